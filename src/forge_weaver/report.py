"""One self-contained page about a fit: what to beware of, then figures and numbers."""

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


def write_report(path: str | Path, aggregator: Aggregator, table: ScoreTable) -> None:
    """Write an HTML page. Figures that need labels are there if the table has any; use labels that the fit had not.

    Args:
        aggregator: fitted.
        table: to judge it on, with the verifiers of the fit.
    """
    report = aggregator.report
    p = aggregator.predict_proba(table)
    notes = [("alarm", text) for text in report.alarms] + [("warning", text) for text in report.warnings]
    notes += [("dropped", f"{name}: {why}") for name, why in report.dropped.items()]
    title = f"Weaver: {report.method}"
    page = f"""<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ padding: .2em .8em; text-align: left; border-bottom: 1px solid #ddd }}
img {{ max-width: 100% }} .note {{ background: #fff3d6; padding: .4em 1em; margin: .4em 0 }}</style>
<h1>{html.escape(title)}</h1>
{"".join(f'<p class="note"><b>{kind}</b> {html.escape(text)}</p>' for kind, text in notes)}
{_table(("", ""), _facts(aggregator, p))}
{_judged(aggregator, table, p)}
<h2>Weights</h2>{_picture(plots.weights(report), "weights")}
{_section("Residual correlation", plots.correlation(report)) if report.correlation else ""}
<h2>Verifiers</h2>{_verifiers(aggregator)}
"""
    Path(path).write_text(page, encoding="utf-8")


def _facts(aggregator: Aggregator, p: np.ndarray) -> list[tuple[str, str]]:
    report = aggregator.report
    facts: list[tuple[str, object]] = [
        ("problems, responses of the fit", f"{report.problems}, {report.responses}"),
        ("share of responses scored", _short(report.coverage)),
        ("share of right responses", _short(report.class_balance)),
        ("residual correlation", _short(report.residual_correlation)),
        ("mean probability here", _short(np.nanmean(p) if not np.isnan(p).all() else None)),
        *report.details.items(),
    ]
    return [(name, str(value)) for name, value in facts]


def _judged(aggregator: Aggregator, table: ScoreTable, p: np.ndarray) -> str:
    """What can be said with labels."""
    labels = table.labels
    if labels is None or not (~np.isnan(labels) & ~np.isnan(p)).any():
        return "<p>Without labels that the fit has not seen nothing can be said here about how right it is.</p>"
    kept = table.labelled_problems()
    p, labels = p[kept], labels[kept]
    measures: list[tuple[str, Callable[[np.ndarray, np.ndarray], float]]] = [
        ("right when choosing the best response", selection_accuracy),
        ("area under the ROC curve", auc),
        ("Brier score", brier),
        ("expected calibration error", ece),
    ]
    rows = []
    for name, measure in measures:

        def drawn(chosen: np.ndarray, measure: Callable[[np.ndarray, np.ndarray], float] = measure) -> float:
            # Few problems drawn anew may be such as have labels and no probability.
            judged = (~np.isnan(p[chosen]) & ~np.isnan(labels[chosen])).any()
            return measure(p[chosen], labels[chosen]) if judged else float("nan")

        low, high = bootstrap(drawn, len(p), draws=200)
        rows.append((name, _short(measure(p, labels)), "" if np.isnan(low) else f"{_short(low)} to {_short(high)}"))
    compared = {aggregator.report.method: p}
    for other in (NaiveMean(), RankMean()):
        with suppress(ValueError):  # constant scores, beside answers that a majority goes by
            compared[type(other).__name__] = other.fit(table).predict_proba(table)[kept]
    curve = plots.selection_curve(compared, labels)
    return (
        f"<h2>Against {len(kept)} labelled problems</h2>"
        + _table(("measure", "value", "95 % interval, problems drawn whole"), rows)
        + _section("Best of k", curve)
        + _section("Reliability", plots.reliability_diagram(p, labels))
    )


def _verifiers(aggregator: Aggregator) -> str:
    entries = aggregator.report.verifiers
    known = ("weight", "tpr", "tnr", "separation", "coverage")
    columns = [name for name in known if any(name in entry for entry in entries.values())]
    ordered = sorted(entries.items(), key=lambda item: -abs(item[1]["weight"]))
    return _table(("verifier", *columns), [(name, *(_short(e.get(c)) for c in columns)) for name, e in ordered])


def _section(title: str, png: bytes) -> str:
    return f"<h2>{title}</h2>{_picture(png, title)}"


def _picture(png: bytes, alt: str) -> str:
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _short(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else f"{value:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + (line("th", head) if any(head) else "") + "".join(line("td", row) for row in rows) + "</table>"
