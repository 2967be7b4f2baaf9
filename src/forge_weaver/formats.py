"""Score table files: .npz, and rows of the public Weaver data sets."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
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
    # Texts as JSON, numbers as arrays: nothing is pickled.
    columns = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    arrays = {name: value for name, value in columns.items() if isinstance(value, np.ndarray)}
    texts = {name: value for name, value in columns.items() if name not in arrays and value is not None}
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
    try:
        return _table_of([dict(row) for row in rows])
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"these are not rows of the public Weaver layout: {error}") from None


def _table_of(rows: list[dict[str, Any]]) -> ScoreTable:
    # Columns of scores; those of steps have several numbers a response, and `weaver_scores` is the published result.
    names = sorted({name for row in rows for name in row if name.endswith(("_scores", "_verdicts"))})
    names = [name for name in names if not name.endswith("_step_scores") and name != "weaver_scores"]
    if not names:
        raise ValueError("no column ends in _scores or _verdicts: these are not rows of the public Weaver layout")
    # Problems may have different numbers of responses: those of the longest column.
    counts = [max(len(row.get(name) or ()) for name in ("samples", *names)) for row in rows]
    present = np.arange(max(counts)) < np.array(counts)[:, None]
    scores, labels = np.full((*present.shape, len(names)), np.nan), np.full(present.shape, np.nan)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        for name in (*names, "answer_correct"):
            values = row.get(name) or [None] * count
            if len(values) != count:
                raise ValueError(f"problem {i}: {len(values)} values in {name} for {count} responses")
            column = labels if name == "answer_correct" else scores[:, :, names.index(name)]
            column[i, :count] = [_number(value) for value in values]

    def texts(name: str) -> list[list[str]] | None:
        lists = [row.get(name) or [None] * count for row, count in zip(rows, counts, strict=True)]
        filled = [["" if text is None else str(text) for text in texts] for texts in lists]
        return filled if any(row.get(name) is not None for row in rows) else None

    # Names without their suffix, where that leaves them unique.
    short = [name.removesuffix("_scores").removesuffix("_verdicts") for name in names]
    prompts = [str(row.get("instruction") or "") for row in rows]
    return ScoreTable(
        scores,
        tuple(full if short.count(name) > 1 else name for full, name in zip(names, short, strict=True)),
        labels=labels if any(row.get("answer_correct") is not None for row in rows) else None,
        answers=texts("extracted_answers"),
        prompts=prompts if any(prompts) else None,
        responses=texts("samples"),
        families=families_by_name(short),
        present=present,
    )


def _number(value: Any) -> float:
    """A score, or the mean of a list of votes; NaN for None."""
    if isinstance(value, list | tuple | np.ndarray):
        votes = [vote for vote in map(_number, value) if not math.isnan(vote)]
        return sum(votes) / len(votes) if votes else math.nan
    return math.nan if value is None else float(value)
