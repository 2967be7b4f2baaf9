"""What the aggregators share that turn scores into verdicts and judge each verifier by two rates."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from .aggregator import Aggregator, Data
from .binned import estimate_balance
from .normalise import NormalScores, thresholds, verdicts
from .prior import logit, sigmoid
from .rank_mean import rank_means

CLIP = 0.01


class VerdictModel(Aggregator):
    """Binarise, drop one-sided verifiers, estimate rates (`estimate`), and combine by naive Bayes.

    A subclass has the settings `class_balance`, `threshold` and `marginals`, and `estimate`.
    """

    class_balance: float | None
    threshold: float | None
    marginals: tuple[float, float] | None
    cuts: np.ndarray
    used: np.ndarray
    mu: np.ndarray
    balance: np.ndarray
    moments: np.ndarray
    known: np.ndarray
    swapped: np.ndarray

    LEARNED: ClassVar[tuple[str, ...]] = ("cuts", "used", "mu", "balance", "moments", "known", "swapped")

    def learn(self, data: Data) -> None:
        balance = self.class_balance
        if balance is None:
            balance = min(max(estimate_balance(data.x, data.problem), CLIP), 1 - CLIP)
        self.balance = np.array(balance)
        self.cuts = thresholds(data.x, float(self.balance), self.threshold)
        said = verdicts(data.x, self.cuts)
        share = np.nanmean(said, axis=0)
        low, high = self.marginals or ((0.2, 0.8) if self.threshold is not None else (0.0, 1.0))
        self.used = (share >= low) & (share <= high) & (share > 0) & (share < 1)
        for name, one, used in zip(data.names, share, self.used, strict=True):
            if not used:
                self.report.dropped[name] = f"it accepts {one:.0%} of the responses, outside {low:.0%} to {high:.0%}"
        if self.used.sum() < 3:
            raise ValueError(
                f"{self.used.sum()} verifiers accept between {low:.0%} and {high:.0%} of the responses, 3 are needed: "
                "give another threshold or other marginals"
            )
        self.report.class_balance = float(self.balance)
        m = self.used.sum()
        self.moments, self.known = np.zeros((2 * m, 2 * m)), np.zeros((m, m))
        self.swapped = np.array(False)
        self._take_in(said[:, self.used])
        u = rank_means(NormalScores.fit(data.x)(data.x))
        if self.posterior(data) @ (u - u.mean()) < 0:
            # The moments do not say which class is which; most verifiers are better than chance.
            self.swapped = np.array(True)
            self.mu = self.mu[:, ::-1]
        self._tell(data)

    def update(self, data: Data) -> None:
        self._take_in(verdicts(data.x, self.cuts)[:, self.used])
        self._tell(data)

    def _take_in(self, said: np.ndarray) -> None:
        """Add second moments of [accepts, rejects] and the counts of pairs they are of, then estimate."""
        both = np.concatenate([said == 1, said == 0], axis=1).astype(np.float64)
        judged = (~np.isnan(said)).astype(np.float64)
        self.moments = self.moments + both.T @ both
        self.known = self.known + judged.T @ judged
        mu = np.clip(self.estimate(), CLIP, 1 - CLIP)
        self.mu = mu[:, ::-1] if self.swapped else mu

    @abstractmethod
    def estimate(self) -> np.ndarray:
        """mu [2 used verifiers, 2] from `moments`, `known` and `balance`: P(verdict | class), rows (a verifier says no,
        it says yes), columns (wrong, right)."""

    def _tell(self, data: Data) -> None:
        names = [name for name, used in zip(data.names, self.used, strict=True) if used]
        rejects, accepts = self._evidence()
        for name, tpr, tnr, weight in zip(names, self.mu[1::2, 1], self.mu[0::2, 0], accepts - rejects, strict=True):
            self.report.verifiers[name].update(weight=float(weight), tpr=float(tpr), tnr=float(tnr))

    def posterior(self, data: Data) -> np.ndarray:
        said = self.filled(verdicts(data.x, self.cuts)[:, self.used])
        rejects, accepts = self._evidence()
        total = (said == 1) @ accepts + (said == 0) @ rejects
        return sigmoid(total + logit(float(self.balance)))

    def _evidence(self) -> np.ndarray:
        """[2, used verifiers] log ratios of a rejection and of an acceptance."""
        return (np.log(self.mu[:, 1]) - np.log(self.mu[:, 0])).reshape(-1, 2).T

    def filled(self, said: np.ndarray) -> np.ndarray:
        """What a missing verdict counts as: nothing."""
        return said
