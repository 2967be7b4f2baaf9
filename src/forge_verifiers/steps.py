"""Rewards for the steps of a response, by a process reward model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge.rewards.verifier import Scores

from .settings import ProcessRewardModelSettings


class StepRewards:
    """Each step of a response earns `weight * p / steps` at its end, where p is the probability that a process reward
    model gives it: a response earns `weight` times the mean, however many steps it has.

    An algorithm with a critic assigns the rewards to the tokens before them; others see their sum, which is an error of
    the configuration.

    Args:
        model: fields of `forge_verifiers.config.ProcessRewardModelSettings`.
        weight: beside other rewards.

    Raises:
        ValueError: an invalid setting.
    """

    gives_steps = True

    def __init__(self, model: Mapping[str, Any], weight: float = 1.0) -> None:
        if not math.isfinite(weight) or weight == 0:
            raise ValueError(f"weight must be a finite number other than 0, got {weight}")
        self.settings, self.weight = ProcessRewardModelSettings(**model), weight
        self.names = (self.settings.name or "steps",)

    def check(self) -> None:
        """ValueError: the model's folder does not exist."""
        self.settings.check_sources("model")

    def setup(self) -> None:
        """Load the process reward model."""
        from .process import ProcessRewardModel

        self._model = ProcessRewardModel(**self.settings)

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, 1], with the reward of each step in `Scores.steps`."""
        probabilities = await self._model.read(prompt, responses)
        sums: list[float | Exception] = []
        steps: list[list[tuple[int, float]]] = []
        for text, of_steps in zip(responses, probabilities, strict=True):
            if isinstance(of_steps, Exception):
                sums.append(of_steps)
                steps.append([])
            else:
                sums.append(self.weight * float(np.mean(of_steps)))
                cuts = zip(self._model.cut(text), of_steps, strict=True)
                steps.append([(end, self.weight * p / len(of_steps)) for (_, end), p in cuts])
        scores = Scores.of(sums, 1)
        scores.steps = steps
        return scores

    async def close(self) -> None:
        """Free the model."""
        await self._model.close()
