"""The interface of all aggregators, the report of a fit, and their files."""

import copy
import dataclasses
import json
import math
import warnings
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from forge.system.files import written_aside

from .table import ScoreTable, reading_npz, write_npz

Json = dict[str, Any]


@dataclasses.dataclass
class FitReport:
    """Report on the fit of an aggregator: counts, coverage, warnings and alarms.

    Args:
        method: the aggregator's name.
        problems, responses: number fitted on.
        class_balance: fraction of right responses, given or estimated; None where the method needs none.
        coverage: fraction of responses scored by at least one verifier.
        verifiers: by name, each verifier's `coverage`, `weight` (0 if dropped) and what else the method estimates:
            `tpr`, `tnr`, or `separation` (mean score of right less that of wrong responses, in standard deviations of
            the verifier's scores).
        dropped: by name, the reason why a verifier was left out.
        residual_correlation: root mean square of the correlations between verifiers' errors, corrected for chance;
            near 0 for conditionally independent verifiers, NaN if too few responses tell. None if not computed.
        correlated: names of the verifiers in the rows and columns of `correlation`.
        correlation: the correlation of each pair of verifiers among right and among wrong responses.
        details: values specific to the method, such as the selected penalty.
        warnings: messages.
        alarms: messages naming verifiers that are being gamed.
        ask: the problems whose labels would help most, the most helpful one first: by prompt, or else by index.
    """

    method: str
    problems: int = 0
    responses: int = 0
    class_balance: float | None = None
    coverage: float = math.nan
    verifiers: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    residual_correlation: float | None = None
    correlated: list[str] = dataclasses.field(default_factory=list)
    correlation: list[list[float]] = dataclasses.field(default_factory=list)
    details: Json = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    alarms: list[str] = dataclasses.field(default_factory=list)
    ask: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        """Return the report as lines: on the whole fit, alarms, warnings, each verifier, the problems to label."""
        summary = f"{self.method}, {self.responses} responses to {self.problems} problems"
        if self.class_balance is not None:
            summary += f", {self.class_balance:.3f} of them right"
        if self.residual_correlation is not None:
            summary += f", residual correlation {self.residual_correlation:.3f}"

        lines = [summary, *(f"alarm: {text}" for text in self.alarms), *(f"warning: {text}" for text in self.warnings)]
        lines += [f"left out: {name}, {reason}" for name, reason in self.dropped.items()]
        lines += [
            f"{name}: {', '.join(f'{key} {value:.3f}' for key, value in entry.items())}"
            for name, entry in self.verifiers.items()
            if name not in self.dropped
        ]
        lines += [f"label first: {problem}" for problem in self.ask]
        return "\n".join(lines)

    def grow(self, data: "Data") -> None:
        """Add the responses of another table to the counts and to the coverage of each verifier."""
        self.problems += len(data.table)
        scored = ~np.isnan(data.table.flat)
        share = len(scored) / (self.responses + len(scored))
        self.responses += len(scored)
        self.coverage += share * (float(scored.any(1).mean()) - self.coverage)
        for name, coverage in zip(data.table.verifiers, scored.mean(0), strict=True):
            self.verifiers[name]["coverage"] += share * (float(coverage) - self.verifiers[name]["coverage"])

    def describe(self, names: list[str], **values: np.ndarray) -> None:
        """Add numbers to the entries of the verifiers `names`: of each value, [names], its element."""
        for index, name in enumerate(names):
            self.verifiers[name].update({key: float(numbers[index]) for key, numbers in values.items()})

    def to_dict(self) -> Json:
        """Return the fields as plain values for JSON, by name, with None instead of NaN."""
        text = json.dumps(dataclasses.asdict(self), default=lambda value: value.item())
        return json.loads(text, parse_constant=lambda _: None)


AGGREGATOR = "aggregator.npz"  # in the folder of an ensemble


@dataclasses.dataclass
class Data:
    """Score table in the form for algorithms: one row per scored response, one column per verifier in use.

    Args:
        x: [responses, verifiers] scores, NaN for missing.
        problem: [responses] index of the problem in the table, non-decreasing; some problems may have no row.
        labels: [responses] 1 for right, 0 for wrong, NaN for unknown.
        rows: [responses] index among the table's present responses.
        table: the source.
        columns: [verifiers] index of the verifier in the table.
    """

    x: np.ndarray
    problem: np.ndarray
    labels: np.ndarray
    rows: np.ndarray
    table: ScoreTable
    columns: np.ndarray

    @property
    def names(self) -> list[str]:
        """Return the names of the verifiers in use, in the order of the columns."""
        return [self.table.verifiers[c] for c in self.columns]

    @property
    def unscored(self) -> np.ndarray:
        """Return the number of responses without a score of each problem of the table, [problems]."""
        return self.table.present.sum(1) - np.bincount(self.problem, minlength=len(self.table))

    def take(self, mask: np.ndarray) -> Self:
        """Return the data of the responses where `mask` [responses] is True."""
        return dataclasses.replace(
            self, x=self.x[mask], problem=self.problem[mask], labels=self.labels[mask], rows=self.rows[mask]
        )


class Aggregator(ABC):
    """Combines weak verifiers into one probability of being right.

    A subclass is a dataclass whose fields are its settings, saved as JSON. Its learned state is in the attributes named
    in `LEARNED`: arrays, or other aggregators.

    Attributes:
        report: result of the fit.
        verifiers: names of the columns at the fit. `predict_proba` matches columns by name, in any order.
        columns: [verifiers in use] index of each among `verifiers`.
    """

    LEARNED: ClassVar[tuple[str, ...]] = ()
    report: FitReport
    verifiers: tuple[str, ...]
    columns: np.ndarray

    def fit(self, table: ScoreTable) -> Self:
        """Learn from a table, and return the aggregator itself.

        Verifiers that are constant or gave no score are dropped and reported; responses without any score are skipped.
        If the fit fails the previous state is kept.

        Raises:
            ValueError: no verifier is left, the table has no labels for a method that needs them, or an invalid
                `class_balance`.
        """
        balance = getattr(self, "class_balance", None)
        if balance is not None and not 0 < balance < 1:
            raise ValueError(f"class_balance (the share of right responses) must be between 0 and 1, got {balance}")
        if balance is not None and getattr(self, "one_right", False):
            raise ValueError("one_right determines the class balance: omit class_balance")

        # On a copy: a failed fit leaves the state as it was.
        fitted = copy.copy(self)
        fitted.verifiers = table.verifiers
        report = FitReport(type(self).__name__, problems=len(table), responses=int(table.present.sum()))

        # Verifiers whose scores carry no information are dropped, with the reason.
        for name, column in zip(table.verifiers, table.flat.T, strict=True):
            scores = column[~np.isnan(column)]
            report.verifiers[name] = {"coverage": len(scores) / len(column), "weight": 0.0}
            if not len(scores):
                report.dropped[name] = "it never gave a score"
            elif np.ptp(scores) == 0:
                report.dropped[name] = f"it always said {scores[0]:g}"

        fitted.columns = np.flatnonzero([name not in report.dropped for name in table.verifiers])
        if not len(fitted.columns):
            raise ValueError("no verifier is usable: each gave no score, or only one constant score")
        data = fitted._table_data(table)
        report.coverage = len(data.x) / report.responses
        fitted.report = report
        fitted.learn(data)
        vars(self).update(vars(fitted))

        return self

    def predict_proba(self, table: ScoreTable) -> np.ndarray:
        """Return each response's probability of being right, [problems, responses].

        It is NaN where a response is absent or was not scored by any verifier.

        Raises:
            ValueError: not fitted, or the verifiers differ from those of the fit.
        """
        table = self._match_verifiers(table)
        data = self._table_data(table)
        probabilities = np.full(int(table.present.sum()), np.nan)
        if len(data.x):
            probabilities[data.rows] = self.posterior(data)
        return table.spread(probabilities)

    @abstractmethod
    def learn(self, data: Data) -> None:
        """Set the attributes in `LEARNED` from the data, and complete the report; `fit` calls this."""

    @abstractmethod
    def posterior(self, data: Data) -> np.ndarray:
        """Return each response's probability of being right, [responses]; `predict_proba` calls this."""

    def warn(self, message: str) -> None:
        """Issue a warning and record it in the report."""
        self.report.warnings.append(message)
        warnings.warn(message, stacklevel=5)

    def save(self, path: str | Path) -> None:
        """Write one .npz file atomically; read by `load`."""
        state = self.state_dict()
        with written_aside(Path(path)) as aside:
            write_npz(aside, {"header": state["header"]}, state["arrays"])

    def state_dict(self) -> Json:
        """Return the fitted state for `restore_aggregator`: a `header` of plain values, and `arrays` by name.

        The arrays of an aggregator in the attribute `a` have names such as "a/edges", and its header is in "parts".
        """
        self._require_fit()
        state = {name: getattr(self, name) for name in ("columns", *self.LEARNED)}
        inner = {name: value.state_dict() for name, value in state.items() if isinstance(value, Aggregator)}
        header = {
            "kind": type(self).__name__,
            "settings": dataclasses.asdict(self),  # type: ignore[call-overload]  # subclasses are dataclasses
            "verifiers": self.verifiers,
            "report": self.report.to_dict(),
            "parts": {name: part["header"] for name, part in inner.items()},
        }
        arrays = {name: np.asarray(value) for name, value in state.items() if value is not None and name not in inner}
        nested = {f"{name}/{key}": array for name, part in inner.items() for key, array in part["arrays"].items()}
        return {"header": header, "arrays": arrays | nested}

    def _table_data(self, table: ScoreTable) -> Data:
        # Responses without any score in use are omitted; they have no probability.
        flat = table.flat
        labels = np.full(len(flat), np.nan) if table.labels is None else table.labels[table.present]
        data = Data(flat[:, self.columns], table.problem_of, labels, np.arange(len(flat)), table, self.columns)
        return data.take((~np.isnan(data.x)).any(1))

    def _match_verifiers(self, table: ScoreTable) -> ScoreTable:
        self._require_fit()
        # Columns are matched by name: their order may differ.
        extra = [name for name in table.verifiers if name not in self.verifiers]
        missing = [name for name in self.verifiers if name not in table.verifiers]
        if extra or missing:
            differences = [
                f"{verb} {', '.join(names)}" for verb, names in (("lacks", missing), ("also has", extra)) if names
            ]
            raise ValueError(f"the score table {' and '.join(differences)}: use table.select(aggregator.verifiers)")
        return table if table.verifiers == self.verifiers else table.select(self.verifiers)

    def _require_fit(self) -> None:
        if not hasattr(self, "report"):
            raise ValueError(f"this {type(self).__name__} is not fitted: call fit first")


def load(path: str | Path) -> Aggregator:
    """Return the saved aggregator, of any kind, in a .npz file or in the folder of an ensemble.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a saved aggregator, or damaged.
    """
    path = Path(path) / AGGREGATOR if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"aggregator file {path} does not exist")
    with reading_npz(path, "saved aggregator") as arrays:
        return restore_aggregator({"header": json.loads(arrays.pop("header").tobytes()), "arrays": arrays})


def restore_aggregator(state: Json) -> Aggregator:
    """Return the fitted aggregator whose `state_dict` this is.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: not a valid state.
    """
    header, arrays = state["header"], state["arrays"]
    aggregator = find_kind(header["kind"])(**header["settings"])
    aggregator.verifiers = tuple(header["verifiers"])
    aggregator.report = FitReport(**header["report"])
    for name in aggregator.LEARNED:
        setattr(aggregator, name, arrays.get(name))
    for name, part in header["parts"].items():
        inner = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
        setattr(aggregator, name, restore_aggregator({"header": part, "arrays": inner}))
    aggregator.columns = arrays["columns"]
    return aggregator


def find_kind(name: str) -> type[Aggregator]:
    """Return the aggregator class with this name. KeyError: there is none."""
    import_module("forge_weaver.auto")  # with every aggregator
    # The list grows as it is walked, so that subclasses of subclasses are found.
    classes = Aggregator.__subclasses__()
    for aggregator_class in classes:
        classes += aggregator_class.__subclasses__()
    return {aggregator_class.__name__: aggregator_class for aggregator_class in classes}[name]
