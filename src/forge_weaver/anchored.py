"""Logistic regression on a few labelled problems."""

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.special import expit as sigmoid

from .aggregator import Aggregator, Data
from .calibration import logistic_regression
from .means import rank_means
from .normalise import NormalScores

PENALTIES = tuple(10.0**e for e in (-0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3))


@dataclasses.dataclass
class AnchoredLogistic(Aggregator):
    """Ridge logistic regression on normal scores, anchored at the rank mean: logit = b + c mean(z) + w z.

    Only w is penalised, so with few labels the result is the calibrated rank mean. Scales are over all responses,
    labelled or not; a missing score counts as its verifier's mean. The penalty minimises the log loss of
    cross-validation over whole problems; folds whose complement has one class are skipped, and if all are, the penalty
    is the largest.

    Args:
        penalties: candidates.
        folds: maximum number.

    Attributes:
        held_out: [labelled, scored responses] cross-validated log loss in nats; NaN where skipped.

    Raises:
        ValueError: fewer than two labelled problems, or labels of one class.
    """

    penalties: tuple[float, ...] = PENALTIES
    folds: int = 10

    LEARNED: ClassVar[tuple[str, ...]] = ("values", "heights", "line", "held_out")

    def learn(self, data: Data) -> None:
        """Fit scales on all responses, the regression on the labelled ones."""
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights
        is_labelled = ~np.isnan(data.labels)
        x, labels = self._design_matrix(data.x[is_labelled]), data.labels[is_labelled]
        groups = np.unique(data.problem[is_labelled], return_inverse=True)[1]
        if not len(groups) or groups.max() < 1 or np.ptp(labels) == 0:
            raise ValueError("logistic regression needs at least two labelled problems, with right and wrong responses")
        penalty, self.held_out = self._cross_validate(x, labels, groups)

        self.line = ridge_logistic(x, labels, penalty)
        self.report.class_balance = float(labels.mean())
        self.report.details.update(
            penalty=penalty,
            log_loss=None if np.isnan(self.held_out).all() else float(np.nanmean(self.held_out)),
            labelled_problems=int(groups.max() + 1),
        )

        # A verifier's weight is its coefficient, and its part of the mean's.
        weights = self.line[2:] + self.line[1] / len(data.columns)
        z, right = x[:, 2:], labels == 1
        separation = (z[right].mean(0) - z[~right].mean(0)) / (z.std(0) + 1e-12)
        for name, weight, distance in zip(data.names, weights, separation, strict=True):
            self.report.verifiers[name].update(weight=float(weight), separation=float(distance))

    def _cross_validate(self, x: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the penalty with the least log loss on held-out problems, and that loss of each response."""
        # Whole problems: responses to one are not independent.
        fold = groups % min(self.folds, groups.max() + 1)
        losses = np.full((len(self.penalties), len(fold)), np.nan)
        for number in range(fold.max() + 1):
            out = fold == number
            if np.ptp(labels[~out]) == 0:
                continue
            for row, penalty in enumerate(self.penalties):
                line = ridge_logistic(x[~out], labels[~out], penalty)
                score = (2 * labels[out] - 1) * (x[out] @ line)
                losses[row, out] = np.logaddexp(0, -score)

        if np.isnan(losses).all():
            return max(self.penalties), losses[0]

        # The sum over all responses: folds differ in size.
        best = int(np.nansum(losses, axis=1).argmin())
        return self.penalties[best], losses[best]

    def _design_matrix(self, x: np.ndarray) -> np.ndarray:
        z = NormalScores(self.values, self.heights)(x)
        return np.concatenate([np.ones((len(z), 1)), rank_means(z)[:, None], np.nan_to_num(z)], axis=1)

    def posterior(self, data: Data) -> np.ndarray:
        """[responses] probability by logistic regression on normal scores."""
        return sigmoid(self._design_matrix(data.x) @ self.line)


def ridge_logistic(x: np.ndarray, labels: np.ndarray, penalty: float) -> np.ndarray:
    """Fit [responses, columns]: the first column is the unpenalised constant, the second the anchor (penalty <= 1)."""
    pull = np.full(x.shape[1], penalty)
    pull[:2] = 1e-6, min(1.0, penalty)
    return logistic_regression(x, labels, pull, np.zeros(x.shape[1]))
