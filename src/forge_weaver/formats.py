"""Score table files."""

from __future__ import annotations

import dataclasses
import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forge.system.files import written_aside

from .table import ScoreTable


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
    """Read a .npz file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a score table.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such score table: {path}")
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
