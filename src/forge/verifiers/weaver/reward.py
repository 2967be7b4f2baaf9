"""Rewards from an ensemble that sees the whole group."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ...observability import Reduce, record_metric
from ..panel import Panel
from ..reward import Watched
from ..verifier import Scores
from .aggregator import Aggregator, restored
from .table import ScoreTable

Form = Literal["probability", "logit", "threshold"]
FORMS = ("probability", "logit", "threshold")


def check_form(form: str, threshold: float, clip: float, follow: int) -> None:
    """ValueError: settings of `WeaverReward` that cannot be."""
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if not 0 < threshold <= 1 or clip <= 0 or follow < 0:
        raise ValueError(
            f"threshold must be above 0 and at most 1, clip above 0 and follow at least 0, "
            f"got {threshold}, {clip}, {follow}"
        )


class WeaverReward:
    """How likely each response of a group is right, by all verifiers together.

    What no verifier could score has no reward (None). What some could not is judged by the others.

    Args:
        panel: the verifiers; those that the aggregator was fitted on, and any that only veto or decide.
        aggregator: fitted.
        form: "probability"; "logit", its log-odds held to +-`clip`; "threshold", 1 where it is at least `threshold`.
        veto: verifiers of 0 and 1 without which nothing is right: where one says less than 1/2, the probability is 0,
            and where one gave no score there is no reward, unless another says that it is wrong.
        decide: verifiers of 0 and 1 that know, each by itself, such as one for each kind of problem: the probability is
            0 where one says less than 1/2, else 1 where any gave a score. A veto counts more, and where none of them
            gave a score the ensemble stands. What is right only if several agree has them as vetoes.
        follow: go on learning from every so many groups that were scored (0: never). A service of several replicas
            has as many followers, each of the groups that it sees.

    Raises:
        ValueError: an unknown form, numbers out of range, or verifiers that the panel lacks; says which.
    """

    def __init__(
        self,
        panel: Panel,
        aggregator: Aggregator,
        *,
        form: Form = "probability",
        threshold: float = 0.5,
        clip: float = 4.0,
        veto: Sequence[str] = (),
        decide: Sequence[str] = (),
        follow: int = 0,
    ) -> None:
        check_form(form, threshold, clip, follow)
        needed = [*aggregator.verifiers, *veto, *decide]
        if missing := [name for name in needed if name not in panel.names]:
            raise ValueError(f"the panel lacks {', '.join(missing)}: it has {', '.join(panel.names)}")
        self.panel, self.aggregator = Watched(panel), aggregator
        self.form, self.threshold, self.clip = form, threshold, clip
        self._columns = [panel.names.index(name) for name in aggregator.verifiers]
        self._veto = [panel.names.index(name) for name in veto]
        self._decide = [panel.names.index(name) for name in decide]
        self._follow, self._seen, self._learning = follow, list[np.ndarray](), asyncio.Lock()

    async def score_group(self, prompt: str, responses: Sequence[str], target: str | None = None) -> list[float | None]:
        """The rewards, in order."""
        if not responses:
            return []
        scores = await self.panel.score(prompt, responses, target)
        rewards = self.rewards(scores)
        if self._follow:
            await self._learn(scores.values[:, self._columns])
        return rewards

    async def close(self) -> None:
        """Close the verifiers."""
        await self.panel.close()

    async def state_dict(self) -> dict[str, Any]:
        """What it has learned by following, and the groups that it is still to learn from."""
        async with self._learning:
            return {"aggregator": self.aggregator.state_dict(), "seen": list(self._seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. ValueError: it is the state of another ensemble."""
        learned = restored(state["aggregator"])
        if not self._follow or type(learned) is not type(self.aggregator):
            here = type(self.aggregator).__name__ + ("" if self._follow else " that does not follow")
            raise ValueError(f"{type(learned).__name__} that follows was saved, and this is {here}")
        if learned.verifiers != self.aggregator.verifiers:
            raise ValueError(
                f"an ensemble of {', '.join(learned.verifiers)} was saved, and this is one of "
                f"{', '.join(self.aggregator.verifiers)}: go on with the ensemble that the run began with"
            )
        self.aggregator, self._seen = learned, list(state["seen"])

    def rewards(self, scores: Scores) -> list[float | None]:
        """What the scores of a group are worth."""
        p = self.probabilities(scores)
        with np.errstate(divide="ignore"):
            logits = np.clip(np.log(p) - np.log1p(-p), -self.clip, self.clip)
        values = {"probability": p, "logit": logits, "threshold": np.where(p >= self.threshold, 1.0, 0.0)}[self.form]
        return [None if np.isnan(p_i) else float(value) for p_i, value in zip(p, values, strict=True)]

    def probabilities(self, scores: Scores) -> np.ndarray:
        """[responses], vetoes and decisions made; NaN where nothing is known, or not what a veto says."""
        p = self.aggregator.predict_proba(self._table([scores.values[:, self._columns]]))[0]
        decided, vetoes = scores.values[:, self._decide], scores.values[:, self._veto]
        p = np.where((decided >= 0.5).any(1), 1.0, p)
        p = np.where(np.isnan(vetoes).any(1), np.nan, p)
        return np.where((decided < 0.5).any(1) | (vetoes < 0.5).any(1), 0.0, p)

    async def _learn(self, values: np.ndarray) -> None:
        if np.isnan(values).all():
            return
        self._seen.append(values)
        async with self._learning:
            while len(self._seen) >= self._follow:
                # A copy learns: groups that are judged meanwhile must not meet half of an update.
                learned, groups = copy.deepcopy(self.aggregator), self._seen[: self._follow]
                await asyncio.to_thread(learned.partial_fit, self._table(groups))
                self.aggregator, self._seen = learned, self._seen[len(groups) :]
                record_metric("reward/alarms", len(learned.report.alarms), Reduce.MAX)

    def _table(self, groups: Sequence[np.ndarray]) -> ScoreTable:
        """[responses, verifiers] of each problem as a table, the shorter ones filled up."""
        widest = max(len(group) for group in groups)
        present = np.array([[i < len(group) for i in range(widest)] for group in groups])
        scores = np.full((*present.shape, len(self.aggregator.verifiers)), np.nan)
        scores[present] = np.concatenate(groups)
        return ScoreTable(scores, self.aggregator.verifiers, present=present)
