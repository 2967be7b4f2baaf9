"""Rows from local files, folders and the Hugging Face hub. Error messages number rows from 1, as lines of a file."""

import csv
import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from ..system.files import decode_content, read_text

if TYPE_CHECKING:
    from datasets import IterableDataset

Row = Mapping[str, Any]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_TEXTS = (".jsonl", *_DELIMITERS)
_SUFFIXES = (".json", *_TEXTS, ".parquet")  # of files that are read
_FILE_SUFFIXES = {*_SUFFIXES, ".txt", ".gz", ".zst", ".arrow", ".yaml", ".pkl"}


class Rows(Sequence[Row]):
    """Rows from Python instead of a path: mappings, or a `datasets.Dataset`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        # An iterator may have no end. Only len(rows) rows are read, since a user's own sequence may never raise
        # IndexError.
        if not isinstance(rows, Sized):
            raise ValueError(
                "the rows have no length (an iterator?): pass a list, such as [*itertools.islice(rows, 1000)]"
            )

        first_rows = list(islice(rows, len(rows)))
        for number, row in enumerate(first_rows, 1):
            if not isinstance(row, Mapping):
                fix = "pass mappings from column to value, for a pandas table table.to_dict('records')"
                raise ValueError(f"dataset, row {number} is {row!r:.40}, but a row must be a mapping: {fix}")

        self._rows = [
            from_columns(row, rows.features) if hasattr(rows, "features") else dict(row) for row in first_rows
        ]
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
    """Return an iterable of rows as `Rows`, a `Path` as text, and any other value as it is. ValueError: it is a file
    with an unknown extension."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Path | Rows):
        return Rows(value)
    if isinstance(value, str | Path):
        with suppress(OSError):  # a file that does not exist here may exist where the run starts
            _local_path(str(value))
    return str(value) if isinstance(value, Path) else value


# The path of a file or folder, a hub id, or rows from Python.
PathOrRows = Annotated[str | Rows | None, BeforeValidator(read_path_or_rows)]


class StoredColumns(Sequence[Row]):
    """Rows of a stored `datasets.Dataset`, each read lazily by index."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return from_columns(self._rows[index], self._rows.features)

    def __iter__(self) -> Iterator[Row]:
        return (from_columns(row, self._rows.features) for row in self._rows)


def from_columns(row: Row, features: Mapping[str, Any] | None = None) -> Row:
    """Return a row without the null keys of the mappings within it; its own null columns stay.

    A columnar file gives every mapping in a column the keys of all rows, as null where a row does not have them.

    Args:
        features: of `datasets`; the numbers of a ClassLabel become its names, -1, an unknown label, becomes None.

    >>> from_columns({"id": None, "message": {"role": "user", "name": None}})
    {'id': None, 'message': {'role': 'user'}}
    """
    # -1, the unknown label, is an index of the None at the end.
    class_names = {
        name: [*feature.names, None] for name, feature in (features or {}).items() if hasattr(feature, "int2str")
    }
    return {
        name: class_names[name][value] if name in class_names and isinstance(value, int) else _drop_nulls(value)
        for name, value in row.items()
    }


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
            raise ValueError(
                f"{location} has the lone surrogate {value[error.start]!a}, which is not a character: repair the text"
            ) from None
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{location} is {value}: fill in the missing value, or remove the row")
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
        path: a file (.json, .jsonl, .csv, .tsv, .parquet), a folder that `datasets` wrote or that holds data
            files, a hub id, or `Rows`.
        split: of a folder or hub id; a file has only one, see `check_split`.
        subset: the configuration of a hub dataset that has several.

    Raises:
        FileNotFoundError, ValueError, ImportError: one line, which names the file and the number of a malformed row.
    """
    file = None if isinstance(path, Rows) else _local_path(path)
    if isinstance(path, Rows) or (file is not None and file.is_file()):
        check_split(str(file or "the list of rows"), split)
    if isinstance(path, Rows):
        return list(path)

    # The package datasets reads folders and hub ids, this module reads files.
    if file is None or file.is_dir():
        loaded = _load_dataset(path, file, split=split, subset=subset, streaming=False)
        rows: Sequence[Row] = list(loaded) if isinstance(loaded, FileStream) else StoredColumns(loaded)
    elif file.suffix != ".parquet":
        rows = list(FileStream(file))
    else:
        datasets = _import_datasets("a parquet file")
        import pyarrow.parquet as parquet

        try:
            rows = StoredColumns(datasets.Dataset(parquet.read_table(file)))
        except (ValueError, OSError) as error:
            raise ValueError(f"{file} is not a parquet file: {error}") from error

    if not len(rows):
        raise ValueError(f"{path} is empty: it has no rows")
    return rows


def check_split(name: str, split: str) -> None:
    """Check that `split` selects all rows, because files and rows from Python have no splits.

    Args:
        name: of the file or rows, for the message.
        split: "train" or "test", the defaults of `dataset.split` and `eval.split`, or "".

    Raises:
        ValueError: it is another one, or a part such as train[:100].
    """
    if split not in ("train", "test", ""):
        raise ValueError(f"{name} has no split {split!r}: omit dataset.split, and write the rows to use to a file")


class FileStream:
    """The rows of .json, .jsonl, .csv and .tsv files, one file after the other.

    Only lines of .jsonl files are read when they are needed, other files at once. Errors name the file and the line or
    row.
    """

    def __init__(self, *files: Path) -> None:
        self._files = files
        # After the last row: the index of its file, its line or number in it from 1, and the offset in bytes.
        self._position = {"file": 0, "number": 0, "place": 0}

    def __iter__(self) -> Iterator[Row]:
        for file in self._files[self._position["file"] :]:
            # (number, place in the file, row) of each row after the position.
            start, is_lines = self._position["number"], file.suffix == ".jsonl"
            if is_lines:
                rows: Iterable[tuple[int, int, Any]] = _read_lines(file, start, self._position["place"])
            else:
                items = enumerate(_read_items(file), 1)
                rows = ((number, 0, row) for number, row in islice(items, start, None))

            for number, place, row in rows:
                if not isinstance(row, dict):
                    unit = "line" if is_lines else "row"
                    raise ValueError(f"{file}, {unit} {number}: a row must be an object, not {type(row).__name__}")
                self._position |= {"number": number, "place": place}
                yield row
            self._position = {"file": self._position["file"] + 1, "number": 0, "place": 0}

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last row that was read."""
        return dict(self._position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position that `state_dict` returned."""
        self._position = dict(state)


def open_stream(path: str, *, split: str, subset: str | None = None) -> "IterableDataset | FileStream":
    """Return the rows of a file, a folder or a hub id as a stream, which reads them when they are needed.

    Takes the arguments of `open_rows`. A malformed row raises when it is read.
    """
    file = _local_path(path)
    if file is None or file.is_dir():
        return _load_dataset(path, file, split=split, subset=subset, streaming=True)

    check_split(path, split)
    if file.suffix != ".parquet":
        return FileStream(file)
    datasets = _import_datasets("a parquet file")
    return datasets.load_dataset("parquet", data_files=path, split="train", streaming=True, trust_remote_code=False)


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
        if file.suffix not in _SUFFIXES:
            fix = f"use {', '.join(_SUFFIXES)}, or pass rows from Python, such as those of datasets.load_dataset"
            raise ValueError(f"{file} has the unsupported extension {file.suffix!r}: {fix}")
        return file

    # A misspelt path must not be taken for a hub id.
    if file.exists():
        raise ValueError(f"{file} must be a file or directory, not a pipe or a device: write its rows to a file")
    if file.suffix in _FILE_SUFFIXES or path.startswith(("/", ".", "~")) or path.count("/") > 1 or not path:
        siblings = [sibling.name for sibling in file.parent.iterdir()] if file.parent.is_dir() else []
        similar = difflib.get_close_matches(file.name, siblings, n=1)
        hint = f"; did you mean {file.parent / similar[0]}?" if similar else ""
        raise FileNotFoundError(f"no such file: {file} (in {Path.cwd()}){hint}")

    return None


def _read_lines(file: Path, number: int, offset: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, offset after it, value) of each line of a .jsonl file after a position."""
    with file.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            number, offset, text = number + 1, offset + len(line), decode_content(line, file, number)
            if text.strip():
                yield number, offset, _parse_json(text, f"{file}, line {number}")


def _read_table(file: Path) -> list[Any]:
    """Return the rows of a .csv or .tsv file, whose cells are text. ValueError: columns and cells do not fit."""
    table = csv.reader(StringIO(read_text(file)), delimiter=_DELIMITERS[file.suffix], strict=True)
    try:
        columns, *rows = [*filter(None, table)] or [[]]
    except csv.Error as error:
        raise ValueError(f"{file}, line {table.line_num}: {error}") from error

    for number, cells in enumerate(rows, 1):
        if len(cells) != len(columns) or len({*columns}) < len(columns):
            raise ValueError(f"{file}, row {number}: {len(cells)} cells for the columns {', '.join(columns)}")
    return [dict(zip(columns, cells, strict=True)) for cells in rows]


def _read_items(file: Path) -> list[Any]:
    """Return the rows of a .csv or .tsv file, or the items of a .json file. ValueError: it is not a list in JSON."""
    if file.suffix in _DELIMITERS:
        return _read_table(file)
    listed = _parse_json(read_text(file), str(file), " (one object a line belongs in a .jsonl file)")
    if not isinstance(listed, list):
        raise ValueError(f"{file} must contain a JSON list of objects, not {type(listed).__name__}")
    return listed


def _parse_json(text: str, location: str, hint: str = "") -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{location}: the JSON is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise ValueError(f"{location}: invalid JSON: {error}{hint}") from error


def _import_datasets(subject: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{subject} needs the package datasets: pip install datasets") from error
    return datasets


def _load_dataset(path: str, folder: Path | None, *, split: str, subset: str | None, streaming: bool) -> Any:
    # A folder that `datasets` wrote.
    subject = path if folder else f"the dataset {path!r} (no such local file or folder, so a Hugging Face id)"
    datasets = _import_datasets(subject)
    if folder and ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists()):
        try:
            dataset = datasets.load_from_disk(str(folder))
        except Exception as error:  # a damaged file raises errors of any class
            message = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"cannot load the dataset {path!r}: {message}") from error
        if isinstance(dataset, datasets.DatasetDict):
            if split not in dataset:
                raise ValueError(f"{path} has no split {split!r}: it has {', '.join(dataset)}")
            dataset = dataset[split]
        else:
            check_split(path, split)

        return dataset.to_iterable_dataset() if streaming else dataset

    # A folder of data files, or a hub id.
    source = str(folder) if folder else path
    try:
        if subset is None:
            # Some datasets require a configuration; "main" is the usual name of the default.
            config_names = datasets.get_dataset_config_names(source)
            subset = "main" if len(config_names) > 1 and "main" in config_names else None

        if folder:
            # Files of text are read here, as datasets would guess types: of 1 and 10**23 it makes 1.0 and 1e23.
            files = datasets.load_dataset_builder(source, subset).config.data_files or {}
            split_files = [Path(file) for file in files.get(split, ())]
            # A .json file of datasets may also have one object a line.
            if split_files and all(file.suffix in _TEXTS or file.read_bytes()[:1] == b"[" for file in split_files):
                return FileStream(*split_files)

        return datasets.load_dataset(source, subset, split=split, streaming=streaming, trust_remote_code=False)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        message = " ".join(str(error).split())
        hint = "" if folder else ". If the hub cannot be reached, give a local .jsonl or .parquet file"
        raise type(error)(f"cannot load the dataset {path!r}: {message}{hint}") from error
