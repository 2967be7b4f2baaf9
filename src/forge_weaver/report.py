"""HTML report of a fit: warnings, figures and tables in one self-contained file."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from . import plots
from .aggregator import Aggregator
from .calibration import auc, bootstrap, brier, ece
from .means import NaiveMean, RankMean
from .selection import selection_accuracy
from .table import ScoreTable

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse } td, th { padding: .2em .8em; text-align: left; border-bottom: 1px solid #ddd }
img { max-width: 100% } .note { background: #fff3d6; padding: .4em 1em; margin: .4em 0 }"""
MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "right when choosing the best response": selection_accuracy,
    "area under the ROC curve": auc,
    "Brier score": brier,
    "expected calibration error": ece,
}


def write_report(path: str | Path, aggregator: Aggregator, table: ScoreTable) -> None:
    """Write an HTML page, with evaluation if the table has labels; use labels that the fit has not seen.

    Args:
        aggregator: fitted.
        table: to evaluate on, with the verifiers of the fit.
    """
    report = aggregator.report
    p = aggregator.predict_proba(table)
    notes = [("alarm", text) for text in report.alarms] + [("warning", text) for text in report.warnings]
    notes += [("dropped", f"{name}: {reason}") for name, reason in report.dropped.items()]
    # The fit's numbers, then each verifier's, the heaviest first.
    facts = {
        "problems, responses of the fit": f"{report.problems}, {report.responses}",
        "share of responses scored": _number(report.coverage),
        "share of right responses": _number(report.class_balance),
        "residual correlation": _number(report.residual_correlation),
        "mean probability here": _number(np.nanmean(p) if not np.isnan(p).all() else None),
        **report.details,
    }
    measures = ("weight", "tpr", "tnr", "separation", "coverage")
    columns = [name for name in measures if any(name in entry for entry in report.verifiers.values())]
    heaviest = sorted(report.verifiers.items(), key=lambda item: -abs(item[1]["weight"]))
    weights = [(name, *(_number(entry.get(column)) for column in columns)) for name, entry in heaviest]
    title = html.escape(f"Weaver: {report.method}")
    page = [
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>',
        *(f'<p class="note"><b>{kind}</b> {html.escape(text)}</p>' for kind, text in notes),
        _table((), list(facts.items())),
        *_evaluation(aggregator, table, p),
        _figure("Weights", plots.weights(report)),
        _figure("Residual correlation", plots.correlation(report)) if report.correlation else "",
        f"<h2>Verifiers</h2>{_table(('verifier', *columns), weights)}",
    ]
    Path(path).write_text("\n".join(page) + "\n", encoding="utf-8")


def _evaluation(aggregator: Aggregator, table: ScoreTable, p: np.ndarray) -> list[str]:
    if table.labels is None or not (~np.isnan(table.labels) & ~np.isnan(p)).any():
        return ["<p>No evaluation: it needs labels that the fit has not seen.</p>"]
    labelled = table.labelled_problems()
    p, labels = p[labelled], table.labels[labelled]
    rows = []
    # Each measure with an interval from drawing whole problems.
    for name, measure in MEASURES.items():

        def drawn(problems: np.ndarray, measure: Callable[[np.ndarray, np.ndarray], float] = measure) -> float:
            # With few problems, a draw may have no response with both a label and a probability.
            judged = (~np.isnan(p[problems]) & ~np.isnan(labels[problems])).any()
            return measure(p[problems], labels[problems]) if judged else float("nan")

        low, high = bootstrap(drawn, len(p), draws=200)
        rows.append((name, _number(measure(p, labels)), "" if np.isnan(low) else f"{_number(low)} to {_number(high)}"))
    curves = {aggregator.report.method: p}
    for baseline in (NaiveMean(), RankMean()):
        with suppress(ValueError):  # all scores are constant, and the aggregator is a majority vote on answers
            curves[type(baseline).__name__] = baseline.fit(table).predict_proba(table)[labelled]
    return [
        f"<h2>Against {len(labelled)} labelled problems</h2>",
        _table(("measure", "value", "95 % interval, problems drawn whole"), rows),
        _figure("Best of k", plots.selection_curve(curves, labels)),
        _figure("Reliability", plots.reliability_diagram(p, labels)),
    ]


def _figure(title: str, png: bytes) -> str:
    return f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _number(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else f"{value:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [("th", head)] if head else []
    cells = [
        "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in line)
        for tag, line in [*lines, *(("td", row) for row in rows)]
    ]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
