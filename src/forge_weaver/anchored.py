"""Logistic regression on a few labelled problems."""

import dataclasses
from typing import ClassVar

import numpy as np
from scipy.special import expit as sigmoid

from .aggregator import Aggregator, Data
from .calibration import logistic_regression
from .means import CalibratedMean
from .normalise import NormalScores

PENALTIES = tuple(10.0**e for e in (-0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3))


@dataclasses.dataclass
class AnchoredLogistic(Aggregator):
    """Ridge logistic regression on normal scores, anchored at the naive mean m: logit = b + c m + w z.

    z are a response's normal scores. Only w is penalised, so with few labels the result is the calibrated mean.
    Normal scores are relative to all responses, labelled or not; a missing score counts as its verifier's mean. The
    penalty is the one with the least log loss in cross-validation over whole problems. A fold is skipped if all other
    labels are of one class; if every fold is, the largest penalty is taken.

    Args:
        penalties: candidates for the penalty of w.
        folds: maximum number of folds of the cross-validation.

    Attributes:
        held_out: [labelled, scored responses] cross-validated log loss in nats; NaN where skipped.

    Raises:
        ValueError: fewer than two labelled problems, or labels of one class.
    """

    penalties: tuple[float, ...] = PENALTIES
    folds: int = 10

    LEARNED: ClassVar[tuple[str, ...]] = ("values", "heights", "mean", "line", "held_out")

    def learn(self, data: Data) -> None:
        """Fit the normal scores on all responses, and the regression on the labelled ones."""
        normal = NormalScores.fit(data.x)
        self.values, self.heights = normal.values, normal.heights
        is_labelled = ~np.isnan(data.labels)
        self.mean = CalibratedMean().fit(data.table)
        x, labels = self._design_matrix(data.take(is_labelled)), data.labels[is_labelled]
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

        # Columns of the regression: constant, mean, then the verifiers. A verifier's weight is its own coefficient and
        # its part of the mean's.
        weights = self.line[2:] + self.line[1] / len(data.columns)
        z, right = x[:, 2:], labels == 1
        separation = (z[right].mean(0) - z[~right].mean(0)) / (z.std(0) + 1e-12)
        self.report.describe(data.names, weight=weights, separation=separation)

    def _cross_validate(self, x: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the penalty with the least log loss on held-out problems, and that loss of each response, [responses].

        Args:
            x: [responses, columns] design matrix.
            labels: [responses] 1 or 0.
            groups: [responses] index of the problem, from 0 without gaps.
        """
        # Whole problems: responses to one are not independent.
        fold = groups % min(self.folds, groups.max() + 1)
        losses = np.full((len(self.penalties), len(fold)), np.nan)
        for number in range(fold.max() + 1):
            held_out = fold == number
            if np.ptp(labels[~held_out]) == 0:
                continue
            for row, penalty in enumerate(self.penalties):
                line = ridge_logistic(x[~held_out], labels[~held_out], penalty)
                margin = (2 * labels[held_out] - 1) * (x[held_out] @ line)
                losses[row, held_out] = np.logaddexp(0, -margin)

        if np.isnan(losses).all():
            return max(self.penalties), losses[0]

        # The sum over all responses: folds differ in size.
        best = int(np.nansum(losses, axis=1).argmin())
        return self.penalties[best], losses[best]

    def _design_matrix(self, data: Data) -> np.ndarray:
        # [responses, 2 + verifiers]: a constant 1, the standardised mean, each verifier's normal score.
        z = NormalScores(self.values, self.heights)(data.x)
        return np.concatenate([np.ones((len(z), 1)), self.mean.evidence(data)[:, None], np.nan_to_num(z)], axis=1)

    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses], by the regression."""
        return sigmoid(self._design_matrix(data) @ self.line)


def ridge_logistic(x: np.ndarray, labels: np.ndarray, penalty: float) -> np.ndarray:
    """Return the coefficients of a ridge logistic regression, [columns].

    Args:
        x: [responses, columns]; the first column is the constant, the second the mean.
        labels: [responses] 1 or 0.
        penalty: of the columns from the third on; the mean's is at most 1, and the constant has nearly none.
    """
    pull = np.full(x.shape[1], penalty)
    pull[:2] = 1e-6, min(1.0, penalty)
    return logistic_regression(x, labels, pull, np.zeros(x.shape[1]))
