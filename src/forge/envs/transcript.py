"""An episode as it is played: tokens, and what is known about every one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..types import Completion, Episode, Origin, Turn


class Transcript:
    """Grows at its end alone: `observe` what the environment says, `sampled` what the policy does."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[Turn] = []
        self.origins: set[Origin] = set()

    def observe(self, tokens: Sequence[int]) -> None:
        """Tokens that the policy is given."""
        self._add(tokens, [False] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens))

    def sampled(self, completion: Completion) -> None:
        """A turn of the policy. ValueError: it was not sampled as a continuation of these tokens."""
        if list(completion.prompt_ids) != self.tokens:
            raise ValueError(f"a turn continues {len(completion.prompt_ids)} tokens that are not the episode's")
        start = len(self.tokens)
        ids = completion.token_ids
        self._add(ids, [True] * len(ids), completion.logprobs, completion.versions)
        self.turns.append(Turn(start, len(self.tokens), completion.version, completion.finish))
        stated = completion.identities
        self.origins |= {Origin(v, stated.get(v, ""), completion.sampled_by) for v in {*completion.versions}}

    def rewarded(self, reward: float) -> None:
        """The environment's reward for the last turn. ValueError: it is no finite number."""
        if not math.isfinite(reward):
            raise ValueError(f"an environment gave the reward {reward}: use None for what could not be scored")
        self.turns[-1] = self.turns[-1]._replace(reward=self.turns[-1].reward + reward)

    @property
    def reward(self) -> float:
        """Of all turns together."""
        return sum(turn.reward for turn in self.turns)

    def episode(self, reward: float | None, *, text: str = "", info: dict[str, Any] | None = None) -> Episode:
        """What was played, to learn from: up to the last token of the policy, if there is one."""
        end = self.turns[-1].end if self.turns else len(self.tokens)
        return Episode.played(
            self.tokens[:end],
            self.mask[:end],
            self.logprobs[:end],
            self.versions[:end],
            turns=self.turns,
            reward=reward,
            origins=self.origins,
            text=text,
            info=info,
        )

    def _add(self, tokens: Sequence[int], mask: list[bool], logprobs: list[float], versions: list[int]) -> None:
        self.tokens += tokens
        self.mask += mask
        self.logprobs += logprobs
        self.versions += versions
