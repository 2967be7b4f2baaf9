"""Figures of a fit as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .aggregator import FitReport
from .calibration import reliability
from .selection import accuracy_against_k


def weights(report: FitReport) -> bytes:
    """Bars of the verifiers' weights, largest first."""
    bars = sorted(((entry["weight"], name) for name, entry in report.verifiers.items()), reverse=True)
    figure, axis = _figure(6, 1 + 0.22 * len(bars))
    axis.barh([_literal(name) for _, name in bars], [weight for weight, _ in bars], color="#4878a8")
    axis.invert_yaxis()
    axis.set_xlabel("weight")
    return _png(figure)


def correlation(report: FitReport) -> bytes:
    """Heat map of the correlations between verifiers within the classes. ValueError if the report has none."""
    if not report.correlation:
        raise ValueError(f"{report.method} computed no residual correlations")
    rows = [[np.nan if value is None else value for value in row] for row in report.correlation]
    # A verifier's correlation with itself would only take the eye.
    matrix = np.array(rows, dtype=float)
    np.fill_diagonal(matrix, np.nan)
    size = 2.5 + 0.2 * len(matrix)
    figure, axis = _figure(size + 1, size)
    image = axis.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r")
    names = [_literal(name) for name in report.correlated]
    axis.set_xticks(range(len(matrix)), names, rotation=90)
    axis.set_yticks(range(len(matrix)), names)
    axis.grid(visible=False)
    figure.colorbar(image, ax=axis, shrink=0.7)
    return _png(figure)


def reliability_diagram(p: np.ndarray, labels: np.ndarray) -> bytes:
    """Accuracy against probability, with the fraction of responses in each bin."""
    diagram = reliability(p, labels)
    figure, axis = _figure(4.5, 4)
    width = 1 / len(diagram.count)
    shares = diagram.count / diagram.count.sum()
    axis.bar(np.arange(len(shares)) * width, shares, width, align="edge", color="#ddd", label="share of responses")
    axis.plot([0, 1], [0, 1], color="#999", linewidth=1)
    axis.plot(diagram.predicted, diagram.right, marker="o", label="share right")
    axis.set_xlabel("probability")
    axis.legend(fontsize=7)
    return _png(figure)


def selection_curve(curves: dict[str, np.ndarray], labels: np.ndarray) -> bytes:
    """Best-of-k accuracy against k, for each named array of probabilities [problems, responses]."""
    figure, axis = _figure(5, 4)
    for name, p in curves.items():
        curve = accuracy_against_k(p, labels)
        axis.plot(curve.ks, curve.selected, marker="o", label=_literal(name))
    axis.plot(curve.ks, curve.oracle, color="#333", linestyle="--", label="oracle (pass@k)")
    axis.plot(curve.ks, curve.chance, color="#999", linestyle="--", label="chance")
    # Powers of two, at which the curve is computed.
    axis.set_xscale("log", base=2)
    axis.set_xticks(curve.ks, [str(k) for k in curve.ks])
    axis.set_xlabel("responses k")
    axis.set_ylabel("share of problems right")
    axis.legend(fontsize=7)
    return _png(figure)


def drift(series: dict[str, Sequence[float]], label: str, alarms: Sequence[int] = ()) -> bytes:
    """A line per name over batches, with marks at the batches that raised an alarm."""
    figure, axis = _figure(6, 3.5)
    for name, values in series.items():
        axis.plot(range(1, len(values) + 1), values, label=_literal(name))
    for number, batch in enumerate(alarms):
        axis.axvline(batch, color="#c44", linewidth=1, label="alarm" if number == 0 else None)
    axis.set_xlabel("batch")
    axis.set_ylabel(label)
    axis.legend(fontsize=7)
    return _png(figure)


def _literal(name: str) -> str:
    """Escape dollar signs, between which matplotlib reads mathematics."""
    return name.replace("$", r"\$")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # Not pyplot: that would change the backend and the current figure of a notebook.
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
    return figure, axis


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
