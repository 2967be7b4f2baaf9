"""The interface of all aggregators, the report of a fit, and their files."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from .table import ScoreTable


@dataclasses.dataclass
class FitReport:
    """Attributes:
    method: the aggregator's name.
    problems, responses: how many it was fitted on.
    class_balance: the share of right responses, given or estimated; None where the method needs none.
    coverage: the share of responses that at least one verifier scored.
    verifiers: for each one its coverage, weight (0 if dropped) and what else the method estimates: `tpr`, `tnr` (shares
        of right responses accepted, of wrong ones rejected) or `separation` (mean of the right less mean of the
        wrong, in standard deviations of the verifier).
    dropped: verifiers left out, and why.
    residual_correlation: root mean square of the correlations between verifiers within a class, less what chance
        makes; near 0 where they are conditionally independent. None where it was not computed.
    correlation: those correlations, a row for each of `correlated`.
    details: what only this method has to say, such as the penalty it chose.
    warnings, alarms: in words. Alarms name verifiers that are being gamed.
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
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    alarms: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        """For people: what to beware of, then a line for each verifier."""
        lines = [f"{self.method}, {self.responses} responses to {self.problems} problems"]
        if self.class_balance is not None:
            lines[0] += f", {self.class_balance:.3f} of them right"
        if self.residual_correlation is not None:
            lines[0] += f", residual correlation {self.residual_correlation:.3f}"
        lines += [f"alarm: {text}" for text in self.alarms] + [f"warning: {text}" for text in self.warnings]
        lines += [f"left out: {name}, {why}" for name, why in self.dropped.items()]
        for name, found in self.verifiers.items():
            if name not in self.dropped:
                lines.append(f"{name}: {', '.join(f'{what} {value:.3f}' for what, value in found.items())}")
        return "\n".join(lines)

    def grow(self, verifiers: Sequence[str], problems: int, known: np.ndarray) -> None:
        """Count further problems, whose [responses, verifiers] scores are known or not."""
        self.problems += problems
        self.responses += len(known)
        share = len(known) / self.responses
        self.coverage += share * (float(known.any(1).mean()) - self.coverage)
        for name, some in zip(verifiers, known.mean(0), strict=True):
            found = self.verifiers[name]
            found["coverage"] += share * (float(some) - found["coverage"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, None in place of NaN."""
        return _plain(dataclasses.asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):  # np.float64 too
        return float(value) if math.isfinite(value) else None
    return value.item() if hasattr(value, "item") else value


FORMAT = "forge_weaver 1"
AGGREGATOR = "aggregator.npz"  # in the folder of an ensemble
# What zip files that are damaged raise, besides OSError, EOFError and ValueError.
BROKEN = (zipfile.BadZipFile, zlib.error, NotImplementedError)


@dataclasses.dataclass
class Data:
    """A table as the algorithms see it: one row a response that was scored, one column a verifier that is used.

    Args:
        x: [responses, verifiers], NaN where missing.
        problem: [responses] its number in the table, rising; problems may be left out.
        labels: [responses] 1, 0, NaN.
        rows: [responses] their numbers among the present ones of the table.
        table: where it came from.
        columns: [verifiers] their numbers in the table.
    """

    x: np.ndarray
    problem: np.ndarray
    labels: np.ndarray
    rows: np.ndarray
    table: ScoreTable
    columns: np.ndarray

    @property
    def names(self) -> list[str]:
        return [self.table.verifiers[c] for c in self.columns]

    @property
    def unscored(self) -> np.ndarray:
        """[problems of the table] responses that are not here because nothing scored them."""
        return self.table.present.sum(1) - np.bincount(self.problem, minlength=len(self.table))

    def take(self, mask: np.ndarray) -> Data:
        """Some of the responses."""
        return dataclasses.replace(
            self, x=self.x[mask], problem=self.problem[mask], labels=self.labels[mask], rows=self.rows[mask]
        )


def check_balance(balance: float | None) -> None:
    """ValueError: it is given and is no share."""
    if balance is not None and not 0 < balance < 1:
        raise ValueError(f"class_balance is the share of right responses, between 0 and 1: it is {balance}")


class Aggregator(ABC):
    """Many weak verifiers made into one probability of being right.

    A subclass is a dataclass: its fields are settings, saved as JSON. What it learns are arrays, named in `LEARNED`, or
    other aggregators. It has `learn`, `update` and `posterior`.

    Attributes:
        report: what the fit found.
        verifiers: the columns that the fit saw, by name. `predict_proba` finds them by name, in any order.
    """

    LEARNED: ClassVar[tuple[str, ...]] = ()
    # Whether it goes by the verifiers' scores.
    SCORES: ClassVar[bool] = True
    report: FitReport
    verifiers: tuple[str, ...]
    columns: np.ndarray

    def fit(self, table: ScoreTable) -> Self:
        """Learn from a table. Verifiers that are constant or never gave a score are left out and reported, and so are
        responses that nothing scored. Where it fails, what was there before stays.

        Raises:
            ValueError: no verifier is left, the method lacks something that it needs (answers, labels), or
                `class_balance` is no share.
        """
        check_balance(getattr(self, "class_balance", None))
        fresh = copy.copy(self)
        fresh._fit(table)
        vars(self).update(vars(fresh))
        return self

    def _fit(self, table: ScoreTable) -> None:
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
        if self.SCORES and not len(self.columns):
            raise ValueError("no verifier is left: each never gave a score or always the same one")
        data = self._data(table)
        self.report.coverage = len(data.x) / len(flat)
        self.learn(data)

    def partial_fit(self, table: ScoreTable) -> Self:
        """Go on learning from a further table; the first one is a fit. What was frozen then (scales, bins) stays so.

        A table without any score changes nothing, and so does one that cannot be learned from (ValueError).
        """
        if not hasattr(self, "report"):
            return self.fit(table)
        table = self._matched(table)
        data = self._data(table)
        if len(data.x):
            later = copy.deepcopy(self)
            later.report.grow(table.verifiers, len(table), ~np.isnan(table.flat))
            later.update(data)
            vars(self).update(vars(later))
        return self

    def predict_proba(self, table: ScoreTable) -> np.ndarray:
        """[problems, responses] probability of being right; NaN where not present or where no verifier gave a score.

        Raises:
            ValueError: not fitted, or other verifiers than those of the fit.
        """
        table = self._matched(table)
        data = self._data(table)
        out = np.full(int(table.present.sum()), np.nan)
        if len(data.x):
            out[data.rows] = self.posterior(data)
        return table.spread(out)

    @abstractmethod
    def learn(self, data: Data) -> None:
        """From a table, for the first time."""

    @abstractmethod
    def update(self, data: Data) -> None:
        """Go on from what was learned."""

    @abstractmethod
    def posterior(self, data: Data) -> np.ndarray:
        """[responses] probabilities."""

    def scored(self, data: Data) -> np.ndarray:
        """[responses] whether there is anything to judge by."""
        return (~np.isnan(data.x)).any(1)

    def warn(self, message: str) -> None:
        """Say it now and in the report."""
        self.report.warnings.append(message)
        warnings.warn(message, stacklevel=5)

    def save(self, path: str | Path) -> None:
        """Write one .npz file, aside and renamed; `load` reads it anywhere."""
        state = self.state_dict()
        header, arrays = state["header"], state["arrays"]
        path = Path(path)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                np.savez_compressed(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """`header`, plain values, and `arrays`: what `restored` makes an aggregator of again."""
        self._require_fit()
        arrays: dict[str, np.ndarray] = {}
        return {"header": {"format": FORMAT, **self._pack("", arrays)}, "arrays": arrays}

    def _pack(self, prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Put the arrays in, return the rest."""
        parts: dict[str, Any] = {}
        for name in ("columns", *self.LEARNED):
            value = getattr(self, name)
            if isinstance(value, Aggregator):
                parts[name] = value._pack(f"{prefix}{name}/", arrays)
            elif value is None:
                parts[name] = None
            else:
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
        """The inverse of what `save` packs; takes its arrays out. KeyError or ValueError where they do not fit."""
        made = cls(**header["settings"])
        made.verifiers = tuple(header["verifiers"])
        made.report = FitReport(**header["report"])
        for name in ("columns", *cls.LEARNED):
            if name not in header["parts"]:
                setattr(made, name, arrays.pop(f"{prefix}{name}"))
            elif (part := header["parts"][name]) is None:
                setattr(made, name, None)
            else:
                setattr(made, name, kind(part["kind"]).unpack(part, f"{prefix}{name}/", arrays))
        if not np.isin(made.columns, np.arange(len(made.verifiers))).all():
            raise ValueError(f"its columns {made.columns} are not of its {len(made.verifiers)} verifiers")
        return made

    def _data(self, table: ScoreTable) -> Data:
        flat = table.flat
        labels = np.full(len(flat), np.nan) if table.labels is None else table.labels[table.present]
        data = Data(flat[:, self.columns], table.problem_of, labels, np.arange(len(flat)), table, self.columns)
        return data.take(self.scored(data))

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
    """Read what `save` wrote, whichever kind it is; of an ensemble's folder, its aggregator.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is something else, or broken.
    """
    path = Path(path)
    if path.is_dir():
        path = path / AGGREGATOR
    if not path.is_file():
        raise FileNotFoundError(f"no such aggregator: {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a saved aggregator: it is no .npz file")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        found = restored({"header": json.loads(arrays.pop("header").tobytes()), "arrays": arrays})
    except KeyError as error:
        raise ValueError(f"{path} is not a saved aggregator: it lacks {error}") from error
    except (TypeError, AttributeError, ValueError, OSError, EOFError, *BROKEN) as error:
        raise ValueError(f"{path} is not a saved aggregator: {error}") from error
    return found


def restored(state: dict[str, Any]) -> Aggregator:
    """The aggregator of a `state_dict`. KeyError, TypeError, AttributeError or ValueError where it is none."""
    header, arrays = state["header"], dict(state["arrays"])
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']!r}, this reads {FORMAT!r}")
    found = kind(header["kind"]).unpack(header, "", arrays)
    if arrays:
        raise ValueError(f"it also has {', '.join(arrays)}")
    return found


def kind(name: str) -> type[Aggregator]:
    """The aggregator of this class name."""
    import forge_weaver

    found = getattr(forge_weaver, name, None)
    if not (isinstance(found, type) and issubclass(found, Aggregator)):
        raise ValueError(f"there is no aggregator {name!r}")
    return found
