"""The interface of all aggregators, and their files."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from .fit_report import FitReport
from .table import ScoreTable

FORMAT = "forge.verifiers.weaver 1"


@dataclasses.dataclass
class Data:
    """A table as the algorithms see it: one row a present response, one column a verifier that is used.

    Args:
        x: [responses, verifiers], NaN where missing.
        problem: [responses] its number, rising.
        labels: [responses] 1, 0, NaN.
        table: where it came from.
        columns: [verifiers] their numbers in the table.
    """

    x: np.ndarray
    problem: np.ndarray
    labels: np.ndarray
    table: ScoreTable
    columns: np.ndarray

    @property
    def names(self) -> list[str]:
        return [self.table.verifiers[c] for c in self.columns]


class Aggregator:
    """Many weak verifiers made into one probability of being right.

    A subclass is a dataclass: its fields are settings, saved as JSON. What it learns are arrays, named in `LEARNED`, or
    other aggregators. It has `learn` and `posterior`, and `update` if it can go on learning.

    Attributes:
        report: what the fit found.
        verifiers: the columns that the fit saw, by name. `predict_proba` finds them by name, in any order.
    """

    LEARNED: ClassVar[tuple[str, ...]] = ()
    report: FitReport
    verifiers: tuple[str, ...]
    columns: np.ndarray

    def fit(self, table: ScoreTable) -> Self:
        """Learn from a table. Verifiers that are constant or never gave a score are left out and reported.

        Raises:
            ValueError: no verifier is left, or the method lacks something that it needs (answers, labels).
        """
        self.verifiers = table.verifiers
        self.report = FitReport(type(self).__name__, problems=len(table), responses=int(table.present.sum()))
        flat = table.flat
        known = ~np.isnan(flat)
        for name, column, some in zip(table.verifiers, flat.T, known.T, strict=True):
            self.report.verifiers[name] = {"coverage": float(some.mean()), "weight": 0.0}
            if not some.any():
                self.report.dropped[name] = "it never gave a score"
            elif np.ptp(column[some]) == 0:
                self.report.dropped[name] = f"it always said {column[some][0]:g}"
        self.columns = np.array([v for v, n in enumerate(self.verifiers) if n not in self.report.dropped], dtype=int)
        if not len(self.columns):
            raise ValueError("no verifier is left: each never gave a score or always the same one")
        data = self._data(table, flat)
        self.report.coverage = float((~np.isnan(data.x)).any(1).mean())
        self.learn(data)
        return self

    def partial_fit(self, table: ScoreTable) -> Self:
        """Go on learning from a further table; the first one is a fit. What was frozen then (scales, bins) stays so."""
        if not hasattr(self, "report"):
            return self.fit(table)
        table = self._matched(table)
        self.report.problems += len(table)
        self.report.responses += int(table.present.sum())
        self.update(self._data(table, table.flat))
        return self

    def predict_proba(self, table: ScoreTable) -> np.ndarray:
        """[problems, responses] probability of being right; NaN where not present or where no verifier gave a score.

        Raises:
            ValueError: not fitted, or other verifiers than those of the fit.
        """
        table = self._matched(table)
        data = self._data(table, table.flat)
        found = np.asarray(self.posterior(data), dtype=np.float64)
        return table.spread(np.where(self.scored(data), found, np.nan))

    def learn(self, data: Data) -> None:
        raise NotImplementedError

    def update(self, data: Data) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot go on learning: fit it anew")

    def posterior(self, data: Data) -> np.ndarray:
        """[responses] probabilities."""
        raise NotImplementedError

    def scored(self, data: Data) -> np.ndarray:
        """[responses] whether there is anything to judge by."""
        return (~np.isnan(data.x)).any(1)

    def warn(self, message: str) -> None:
        """Say it now and in the report."""
        self.report.warnings.append(message)
        warnings.warn(message, stacklevel=4)

    def save(self, path: str | Path) -> None:
        """Write one .npz file, aside and renamed; `load` reads it anywhere."""
        self._require_fit()
        arrays: dict[str, np.ndarray] = {}
        header = {"format": FORMAT, **self._pack("", arrays)}
        path = Path(path)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                np.savez_compressed(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def _pack(self, prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Put the arrays in, return the rest."""
        parts = {}
        for name in ("columns", *self.LEARNED):
            value = getattr(self, name)
            if isinstance(value, Aggregator):
                parts[name] = value._pack(f"{prefix}{name}/", arrays)
            elif value is not None:
                arrays[f"{prefix}{name}"] = np.asarray(value)
        return {
            "kind": type(self).__name__,
            "settings": dataclasses.asdict(self),  # type: ignore[call-overload]  # subclasses are dataclasses
            "verifiers": self.verifiers,
            "report": self.report.to_dict(),
            "parts": parts,
        }

    @classmethod
    def unpack(cls, header: dict[str, Any], prefix: str, arrays: dict[str, np.ndarray]) -> Self:
        """The inverse of what `save` packs."""
        made = cls(**header["settings"])
        made.verifiers = tuple(header["verifiers"])
        made.report = FitReport(**header["report"])
        for name in ("columns", *cls.LEARNED):
            part = header["parts"].get(name)
            if part is not None:
                setattr(made, name, kind(part["kind"]).unpack(part, f"{prefix}{name}/", arrays))
            else:
                setattr(made, name, arrays.get(f"{prefix}{name}"))
        return made

    def _data(self, table: ScoreTable, flat: np.ndarray) -> Data:
        labels = np.full(len(flat), np.nan) if table.labels is None else table.labels[table.present]
        return Data(flat[:, self.columns], table.problem_of, labels, table, self.columns)

    def _matched(self, table: ScoreTable) -> ScoreTable:
        self._require_fit()
        extra = [name for name in table.verifiers if name not in self.verifiers]
        missing = [name for name in self.verifiers if name not in table.verifiers]
        if extra or missing:
            said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"also has {', '.join(extra)}"] * bool(extra)
            raise ValueError(f"the table {' and '.join(said)}: use table.select(aggregator.verifiers)")
        return table if table.verifiers == self.verifiers else table.select(self.verifiers)

    def _require_fit(self) -> None:
        if not hasattr(self, "report"):
            raise ValueError(f"this {type(self).__name__} has not been fitted")


def load(path: str | Path) -> Aggregator:
    """Read what `save` wrote, whichever kind it is.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is something else, or broken.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such aggregator: {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}, this reads {FORMAT!r}")
        return kind(header["kind"]).unpack(header, "", arrays)
    except (KeyError, TypeError, AttributeError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a saved aggregator: {error}") from error


def kind(name: str) -> type[Aggregator]:
    """The aggregator of this class name."""
    from forge.verifiers import weaver

    found = getattr(weaver, name, None)
    if not (isinstance(found, type) and issubclass(found, Aggregator)):
        raise ValueError(f"there is no aggregator {name!r}")
    return found
