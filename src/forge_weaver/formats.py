"""Score table files: .npz, and the layout of the public Weaver data sets."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from forge.system.files import written_aside

from .table import ScoreTable, families_by_name


def check_path(path: str | Path) -> None:
    """Check that a table can be written to `path`. ValueError: another suffix. FileNotFoundError: no folder."""
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"cannot write {path}: a score table is a .npz file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")


def save_table(table: ScoreTable, path: Path) -> None:
    """Write a .npz file."""
    check_path(path)
    names = ("verifiers", "families", "answers", "prompts", "responses")
    texts = {name: value for name in names if (value := getattr(table, name)) is not None}
    # Texts as JSON, numbers as arrays: nothing is pickled.
    arrays = {"scores": table.scores, "present": table.present}
    if table.labels is not None:
        arrays["labels"] = table.labels
    with written_aside(path) as aside:
        write_npz(aside, {"texts": texts}, arrays)


def load_table(path: Path) -> ScoreTable:
    """Read a .npz file, or a Parquet file in the layout of the public Weaver data sets.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a score table.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such score table: {path}")
    if path.suffix == ".parquet":
        try:
            return from_public(pyarrow.parquet.read_table(path).to_pylist())
        except (ValueError, OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{path}: {error}") from error
    if path.suffix != ".npz":
        raise ValueError(f"cannot read {path}: a score table is a .npz file, or a .parquet file of the public layout")
    with reading_npz(path, "score table") as arrays:
        columns: dict[str, Any] = {**json.loads(arrays.pop("texts").tobytes()), **arrays}
        fields = {field.name for field in dataclasses.fields(ScoreTable)}
        if surplus := columns.keys() - fields:
            raise ValueError(f"it also has {', '.join(sorted(surplus))}")
        present = columns.pop("present")
        return ScoreTable(columns.pop("scores"), columns.pop("verifiers"), present=present, **columns)


def write_npz(path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, and each value of `header` as UTF-8 JSON in an array of bytes."""
    encoded = {name: np.frombuffer(json.dumps(value).encode(), dtype=np.uint8) for name, value in header.items()}
    with path.open("wb") as file:  # savez appends .npz to a bare path
        np.savez_compressed(file, **encoded, **arrays)  # type: ignore[arg-type]


@contextmanager
def reading_npz(path: Path, kind: str) -> Iterator[dict[str, np.ndarray]]:
    """The arrays of a .npz file. ValueError: it is damaged, or an error in the body shows that it is not a `kind`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        yield arrays
    except KeyError as error:
        raise ValueError(f"{path} is not a {kind}: it lacks {error}") from error
    except (
        *(TypeError, AttributeError, ValueError, OSError, EOFError),
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError),  # damaged zip files
        *(RecursionError, MemoryError, OverflowError, IndexError, RuntimeError, SyntaxError),  # odd headers
    ) as error:
        reason = "not a .npz file of numbers" if "allow_pickle" in str(error) else error
        raise ValueError(f"{path} is not a {kind}: {reason}") from error


def from_public(rows: Iterable[Mapping[str, Any]]) -> ScoreTable:
    """A table from rows of the public Weaver data sets (Saad-Falcon et al. 2025), one per problem.

    `<name>_scores` is a list of numbers, `<name>_verdicts` a list of votes or of lists of votes, which are averaged;
    None is missing. `answer_correct`, `extracted_answers`, `instruction` and `samples` become labels, answers, prompts
    and responses. Step scores and the published ensemble's own scores are skipped.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("there are no rows")
    if not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("a row must be an object with the columns of one problem")
    # Columns of scores; those of steps have several numbers a response, and `weaver_scores` is the published result.
    names = sorted({name for row in rows for name in row if name.endswith(("_scores", "_verdicts"))})
    names = [name for name in names if not name.endswith("_step_scores") and name != "weaver_scores"]
    if not names:
        raise ValueError("no column ends in _scores or _verdicts: these are not rows of the public Weaver layout")
    for i, row in enumerate(rows):
        for name in ("samples", "extracted_answers", "answer_correct", *names):
            if not isinstance(row.get(name), list | tuple | np.ndarray | None):
                raise ValueError(f"problem {i}: {name} must be a list, not {row[name]!r:.60}")
    # Problems may have different numbers of responses: those of the longest column.
    counts = [
        max((len(row[name]) for name in ("samples", *names) if row.get(name) is not None), default=0) for row in rows
    ]
    present = np.arange(max(counts)) < np.array(counts)[:, None]

    scores, labels = np.full((*present.shape, len(names)), np.nan), np.full(present.shape, np.nan)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        for name in (*names, "answer_correct"):
            if (values := row.get(name)) is None:
                continue
            if len(values) != count:
                raise ValueError(f"problem {i}: {len(values)} values in {name} for {count} responses")
            location = f"problem {i}, {name}"
            if name == "answer_correct":
                labels[i, :count] = _labels(values, location)
            else:
                scores[i, :count, names.index(name)] = [_number(value, location) for value in values]

    def column(name: str) -> list[Any] | None:
        values = [row.get(name) for row in rows]
        return None if all(value is None for value in values) else values

    def texts(name: str) -> list[list[str]] | None:
        if (lists := column(name)) is None:
            return None
        filled = [[None] * count if texts is None else texts for texts, count in zip(lists, counts, strict=True)]
        return [list(map(_text, texts)) for texts in filled]

    # Names without their suffix, where that leaves them unique.
    short = [name.removesuffix("_scores").removesuffix("_verdicts") for name in names]
    prompts = column("instruction")
    return ScoreTable(
        scores,
        tuple(full if short.count(name) > 1 else name for full, name in zip(names, short, strict=True)),
        labels=None if column("answer_correct") is None else labels,
        answers=texts("extracted_answers"),
        prompts=None if prompts is None else list(map(_text, prompts)),
        responses=texts("samples"),
        families=families_by_name(short),
        present=present,
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _number(value: object, location: str) -> float:
    """A score, or the mean of a list of votes; NaN for None."""
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value)
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        votes = [score for score in (_number(vote, location) for vote in value) if not math.isnan(score)]
        return sum(votes) / len(votes) if votes else math.nan
    raise ValueError(f"{location}: {value!r} is not a score")


def _labels(values: Iterable[Any], location: str) -> list[float]:
    try:
        return [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{location}: labels are 1, 0 or missing: {error}") from error
