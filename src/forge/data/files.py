"""Rows from local files, folders and the Hugging Face hub. Messages number rows from 1, as lines."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from ..system.files import read_text

if TYPE_CHECKING:
    from datasets import IterableDataset

Row = Mapping[str, Any]

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_FILE_SUFFIXES = {*_BUILDERS, ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow", ".yaml", ".pkl"}


class Rows(Sequence[Row]):
    """Rows from Python instead of a path: mappings, or a `datasets.Dataset`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        # An iterator may have no end, and a sequence of the user's own may never raise IndexError.
        if not isinstance(rows, Sized):
            raise ValueError(
                "the dataset has no length: give a list of its rows, such as [*itertools.islice(rows, 1000)]"
            )
        first_rows = list(islice(rows, len(rows)))
        for number, row in enumerate(first_rows, 1):
            if not isinstance(row, Mapping):
                fix = "give mappings of columns, of a pandas table table.to_dict('records')"
                raise ValueError(f"dataset, row {number} is {row!r:.40}, not a row: {fix}")
        self._rows = [from_columns(row) if hasattr(rows, "features") else dict(row) for row in first_rows]
        if not self._rows:
            raise ValueError("the dataset is empty: it has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def describe(self) -> str:
        """Return number and digest, for a run's config.yaml."""
        digest = hashlib.sha256(json.dumps(self._rows, default=str).encode()).hexdigest()
        return f"<{len(self)} rows from Python, sha256 {digest[:16]}>"


def read_path_or_rows(value: Any) -> Any:
    """Return rows from Python as `Rows`, a path as text, and all else as it is."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Path | Rows):
        return Rows(value)
    return str(value) if isinstance(value, Path) else value


# The path of a file or folder, a hub id, or rows from Python.
PathOrRows = Annotated[str | Rows | None, BeforeValidator(read_path_or_rows)]


class StoredColumns(Sequence[Row]):
    """Rows of a stored `datasets.Dataset`."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return from_columns(self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return map(from_columns, self._rows)


def from_columns(row: Row) -> Row:
    """Return a row as it was before it was stored in columns, where every mapping within it has the keys of all rows:
    those that are null are absent. A column that is null stays."""
    return {name: _drop_nulls(value) for name, value in row.items()}


def _drop_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def check_values(value: object, location: str) -> None:
    """Raise ValueError if something in a value, however deep, is a missing number (nan, inf) or half a character (a
    lone surrogate), which no tokenizer reads."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{location} holds half a character, {value[error.start]!a}: repair the text") from None
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{location} is {value}: fill in the missing value, or leave the row out")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            check_values(str(name), location)
            check_values(item, f"{location}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            check_values(item, location)


def open_rows(path: str | Rows, *, split: str, subset: str | None = None) -> Sequence[Row]:
    """Return all rows of a .json, .jsonl or .parquet file (`split` does not apply), a folder or a hub id, with random
    access.

    A folder is one written by `datasets` or one of data files.

    Raises:
        FileNotFoundError, ValueError, ImportError: one line; a malformed line is named by file and number.
    """
    if isinstance(path, Rows):
        return list(path)
    file = _local_path(path)

    # Folders and hub ids are read by `datasets`, files by this module.
    rows: Sequence[Row]
    if file is None or file.is_dir():
        rows = StoredColumns(_load_dataset(path, file, split=split, subset=subset, streaming=False))
    elif file.suffix == ".parquet":
        _import_datasets("a parquet file")
        import pyarrow.parquet as parquet

        try:
            rows = list(map(from_columns, parquet.read_table(file).to_pylist()))
        except (ValueError, OSError) as error:
            raise ValueError(f"{file} is not a parquet file: {error}") from error
    else:
        rows = _read_json(file)

    if not len(rows):
        raise ValueError(f"{path} is empty: it has no rows")
    return rows


def open_stream(path: str, *, split: str, subset: str | None = None) -> IterableDataset:
    """Open the rows of `open_rows` as a stream: they are read, and their errors raised, when they are needed."""
    file = _local_path(path)
    if file is None or file.is_dir():
        return _load_dataset(path, file, split=split, subset=subset, streaming=True)
    if file.suffix == ".parquet":
        _import_datasets("a parquet file")

    datasets = _import_datasets("streaming")
    settings = {"data_files": str(file), "split": "train", "streaming": True}
    if file.suffix != ".parquet":
        settings["encoding"] = "utf-8-sig"
    return datasets.load_dataset(_BUILDERS[file.suffix], **settings, trust_remote_code=False)


def _local_path(path: str) -> Path | None:
    """Return the file or folder of a path, or None if it is a hub id."""
    file = Path(path).expanduser()
    if file.is_dir():
        return file
    if file.is_file():
        if file.suffix not in _BUILDERS:
            raise ValueError(f"{file} has the unknown extension {file.suffix!r}: use {', '.join(_BUILDERS)}")
        return file

    # A misspelt path must not be taken for a hub id.
    if file.exists():
        raise ValueError(f"{file} is neither a file nor a folder, but a pipe or a device: write its rows to a file")
    if file.suffix in _FILE_SUFFIXES or path.startswith(("/", ".", "~")) or path.count("/") > 1 or not path:
        siblings = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        similar = difflib.get_close_matches(file.name, siblings, n=1)
        hint = f"; did you mean {file.parent / similar[0]}?" if similar else ""
        raise FileNotFoundError(f"no such file: {file} (in {Path.cwd()}){hint}")

    return None


def _read_json(file: Path) -> list[Row]:
    """Return the rows of a .jsonl file, one object a line, or of a .json file, a list of objects."""
    if file.suffix == ".jsonl":
        numbered: list[tuple[str, Any]] = []
        with file.open(encoding="utf-8-sig") as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        numbered.append((f"line {number}", json.loads(line)))
            except UnicodeDecodeError:
                read_text(file)  # names the line, which buffering hides here
                raise
            except RecursionError:
                raise ValueError(f"{file}, line {number}: it is nested too deeply") from None
            except ValueError as error:  # also of a number with thousands of digits
                raise ValueError(f"{file}, line {number}: not JSON: {error}") from error
    else:
        # A .json file is one list, all of which is read at once.
        text = read_text(file)
        try:
            listed = json.loads(text)
        except RecursionError:
            raise ValueError(f"{file} is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{file}: not JSON: {error} (one object a line belongs in a .jsonl file)") from error

        if not isinstance(listed, list):
            raise ValueError(f"{file} must hold a list of objects, not {type(listed).__name__}")
        numbered = [(f"row {number}", row) for number, row in enumerate(listed, 1)]

    # A row is an object in either form.
    for location, row in numbered:
        if not isinstance(row, dict):
            raise ValueError(f"{file}, {location}: a row must be an object, not {type(row).__name__}")

    return [row for _, row in numbered]


def _import_datasets(subject: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{subject} needs the datasets package: pip install datasets") from error
    return datasets


def _load_dataset(path: str, folder: Path | None, *, split: str, subset: str | None, streaming: bool) -> Any:
    datasets = _import_datasets(
        f"the dataset {path!r} (no such local file or folder, so a Hugging Face id)" if not folder else path
    )
    if folder and ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists()):
        try:
            saved = datasets.load_from_disk(str(folder))
        except Exception as error:  # of a damaged file it raises any
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"cannot load the dataset {path!r}: {reason}") from error
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ValueError(f"{path} has no split {split!r}: it has {', '.join(saved)}")
            saved = saved[split]
        return saved.to_iterable_dataset() if streaming else saved

    # Data files or a hub id; an unreachable hub is the most frequent error.
    source = str(folder) if folder else path
    try:
        if subset is None:
            # Some datasets require a configuration; "main" is the usual name of the default.
            names = datasets.get_dataset_config_names(source)
            subset = "main" if len(names) > 1 and "main" in names else None
        return datasets.load_dataset(source, subset, split=split, streaming=streaming, trust_remote_code=False)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        local = "" if folder else ". If the hub cannot be reached, give a local .jsonl or .parquet file"
        raise type(error)(f"cannot load the dataset {path!r}: {reason}{local}") from error
