"""What the aggregators share that turn scores into verdicts and judge each verifier by two rates."""

from __future__ import annotations

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
    tpr: np.ndarray
    tnr: np.ndarray
    balance: np.ndarray
    moments: np.ndarray
    known: np.ndarray
    swapped: np.ndarray

    LEARNED: ClassVar[tuple[str, ...]] = ("cuts", "used", "tpr", "tnr", "balance", "moments", "known", "swapped")

    def learn(self, data: Data) -> None:
        balance = self.class_balance if self.class_balance is not None else estimate_balance(data.x, data.problem)
        self.balance = np.array(min(max(balance, CLIP), 1 - CLIP))
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
            self.tpr, self.tnr = 1 - self.tnr, 1 - self.tpr
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
        tpr, tnr = (np.clip(rate, CLIP, 1 - CLIP) for rate in self.estimate())
        self.tpr, self.tnr = (1 - tnr, 1 - tpr) if self.swapped else (tpr, tnr)

    def estimate(self) -> tuple[np.ndarray, np.ndarray]:
        """TPR and TNR of each used verifier, from `moments`, `known` and `balance`."""
        raise NotImplementedError

    def _tell(self, data: Data) -> None:
        names = [name for name, used in zip(data.names, self.used, strict=True) if used]
        for name, tpr, tnr in zip(names, self.tpr, self.tnr, strict=True):
            weight = float(logit(tpr) + logit(tnr))
            self.report.verifiers[name].update(weight=weight, tpr=float(tpr), tnr=float(tnr))

    def posterior(self, data: Data) -> np.ndarray:
        said = self.filled(verdicts(data.x, self.cuts)[:, self.used])
        accepts, rejects = np.log(self.tpr / (1 - self.tnr)), np.log((1 - self.tpr) / self.tnr)
        total = (said == 1) @ accepts + (said == 0) @ rejects
        return sigmoid(total + logit(float(self.balance)))

    def filled(self, said: np.ndarray) -> np.ndarray:
        """What a missing verdict counts as: nothing."""
        return said
