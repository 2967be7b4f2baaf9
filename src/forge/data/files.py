"""Rows from local files, folders and the Hugging Face hub. Error messages number rows from 1, as lines of a file."""

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
        # An iterator may have no end. Only len(rows) rows are read, since a user's own sequence may never raise
        # IndexError.
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
        """Return the number of rows and their digest as text, which stands for them in a run's config.yaml."""
        digest = hashlib.sha256(json.dumps(self._rows, default=str).encode()).hexdigest()
        return f"<{len(self)} rows from Python, sha256 {digest[:16]}>"


def read_path_or_rows(value: Any) -> Any:
    """Return an iterable of rows as `Rows`, a `Path` as text, and any other value as it is."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Path | Rows):
        return Rows(value)
    return str(value) if isinstance(value, Path) else value


# The path of a file or folder, a hub id, or rows from Python.
PathOrRows = Annotated[str | Rows | None, BeforeValidator(read_path_or_rows)]


class StoredColumns(Sequence[Row]):
    """Rows of a stored `datasets.Dataset`, each read when it is asked for."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return from_columns(self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return map(from_columns, self._rows)


def from_columns(row: Row) -> Row:
    """Return a row without the null keys of the mappings within it; its own null columns stay.

    A columnar file gives every mapping in a column the keys of all rows, as null where a row does not have them.

    >>> from_columns({"id": None, "message": {"role": "user", "name": None}})
    {'id': None, 'message': {'role': 'user'}}
    """
    return {name: _drop_nulls(value) for name, value in row.items()}


def _drop_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def check_values(value: object, location: str) -> None:
    """Check that a value holds, at any depth, no missing number (nan, inf) and no lone surrogate, half of a character,
    which tokenizers cannot encode.

    Args:
        location: of the value, for the message, such as "row 3".

    Raises:
        ValueError: names the location of the first one, such as "row 3.score".
    """
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
    """Return all rows of a file, a folder or a hub id, with random access.

    Args:
        path: a .json, .jsonl or .parquet file, a folder that `datasets` wrote or that holds data files, a hub id, or
            `Rows`.
        split: of a folder or hub id; a file has only one.
        subset: the configuration of a hub dataset that has several.

    Raises:
        FileNotFoundError, ValueError, ImportError: one line, which names the file and the number of a malformed row.
    """
    if isinstance(path, Rows):
        return list(path)
    file = _local_path(path)

    # The package datasets reads folders and hub ids, this module reads files.
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
    """Return the rows of a file, a folder or a hub id as a stream, which reads them when they are needed.

    Takes the arguments of `open_rows`. A malformed row raises when it is read.
    """
    file = _local_path(path)
    if file is None or file.is_dir():
        return _load_dataset(path, file, split=split, subset=subset, streaming=True)

    is_parquet = file.suffix == ".parquet"
    datasets = _import_datasets("a parquet file" if is_parquet else "streaming")
    settings = {"data_files": str(file), "split": "train", "streaming": True}
    settings |= {} if is_parquet else {"encoding": "utf-8-sig"}
    return datasets.load_dataset(_BUILDERS[file.suffix], **settings, trust_remote_code=False)


def _local_path(path: str) -> Path | None:
    """Return the local file or folder that a path names, or None if the path is a hub id.

    Raises:
        FileNotFoundError: it looks like a file, and there is none.
        ValueError: its extension is unknown, or it is a pipe or a device.
    """
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
    """Return the rows of a .jsonl file, which holds one object a line, or of a .json file, which is a list of objects.

    Raises:
        ValueError: it is not JSON, or a row is not an object; names the file and the line or row.
    """
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
        # A .json file is one list.
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
    subject = path if folder else f"the dataset {path!r} (no such local file or folder, so a Hugging Face id)"
    datasets = _import_datasets(subject)
    if folder and ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists()):
        try:
            saved = datasets.load_from_disk(str(folder))
        except Exception as error:  # a damaged file raises errors of any class
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"cannot load the dataset {path!r}: {reason}") from error
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ValueError(f"{path} has no split {split!r}: it has {', '.join(saved)}")
            saved = saved[split]
        return saved.to_iterable_dataset() if streaming else saved

    # A folder of data files, or a hub id.
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
