"""Rows from local files, folders and the Hugging Face hub. Messages number rows from 1, as lines."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import IterableDataset

Row = Mapping[str, Any]

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_FILE_SUFFIXES = {*_BUILDERS, ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow", ".yaml", ".pkl"}


class Rows(Sequence[Row]):
    """Rows from Python in place of a path: mappings, or a `datasets.Dataset`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = [dict(row) for row in rows]
        if not self._rows:
            raise ValueError("the dataset is empty: it has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def describe(self) -> str:
        """Number and digest, for a run's config.yaml."""
        digest = hashlib.sha256(json.dumps(self._rows, default=str).encode()).hexdigest()
        return f"<{len(self)} rows from Python, sha256 {digest[:16]}>"


def open_rows(path: str | Rows, *, split: str, subset: str | None = None) -> Sequence[Row]:
    """All rows of a .json, .jsonl or .parquet file (`split` does not apply), a folder or a hub id, with random access.

    A folder is one written by `datasets` or one of data files.

    Raises:
        FileNotFoundError, ValueError, ImportError: one line; a malformed line is named by file and number.
    """
    if isinstance(path, Rows):
        return list(path)
    place = _local(path)
    if place is None or place.is_dir():
        rows = _load(path, place, split=split, subset=subset, streaming=False)
    elif place.suffix == ".parquet":
        _datasets("a parquet file")
        import pyarrow.parquet as parquet

        try:
            rows = parquet.read_table(place).to_pylist()
        except (ValueError, OSError) as error:
            raise ValueError(f"{place} is not a parquet file: {error}") from error
    else:
        rows = _read_json(place)
    if not len(rows):
        raise ValueError(f"{path} is empty: it has no rows")
    return rows


def open_stream(path: str, *, split: str, subset: str | None = None) -> IterableDataset:
    """As `open_rows`, but rows are read, and their errors raised, as they are needed."""
    place = _local(path)
    if place is None or place.is_dir():
        return _load(path, place, split=split, subset=subset, streaming=True)
    builder = _BUILDERS[place.suffix]
    return _datasets("streaming").load_dataset(builder, data_files=str(place), split="train", streaming=True)


def _local(path: str) -> Path | None:
    """The file or folder of a path, or None if it is a hub id."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.is_file():
        if place.suffix not in _BUILDERS:
            raise ValueError(f"{place} has the unknown extension {place.suffix!r}: use {', '.join(_BUILDERS)}")
        return place
    if place.suffix in _FILE_SUFFIXES or path.startswith(("/", ".", "~")) or path.count("/") > 1 or not path:
        siblings = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
        near = difflib.get_close_matches(place.name, siblings, n=1)
        hint = f"; did you mean {place.parent / near[0]}?" if near else ""
        raise FileNotFoundError(f"no such file: {place} (in {Path.cwd()}){hint}")
    return None


def _read_json(place: Path) -> list[Row]:
    """The rows of a .jsonl file, one object a line, or of a .json file, a list of objects."""
    if place.suffix == ".jsonl":
        numbered: list[tuple[str, Any]] = []
        with place.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip():
                        numbered.append((f"line {number}", json.loads(line)))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{place}, line {number}: not JSON: {error}") from error
    else:
        try:
            listed = json.loads(place.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON: {error} (one object a line belongs in a .jsonl file)") from error
        if not isinstance(listed, list):
            raise ValueError(f"{place} must hold a list of objects, not {type(listed).__name__}")
        numbered = [(f"row {number}", row) for number, row in enumerate(listed, 1)]
    for where, row in numbered:
        if not isinstance(row, dict):
            raise ValueError(f"{place}, {where}: a row must be an object, not {type(row).__name__}")
    return [row for _, row in numbered]


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{what} needs the datasets package: pip install datasets") from error
    return datasets


def _load(path: str, place: Path | None, *, split: str, subset: str | None, streaming: bool) -> Any:
    datasets = _datasets(
        f"the dataset {path!r} (no such local file or folder, so a Hugging Face id)" if not place else path
    )
    if place and ((place / "state.json").exists() or (place / "dataset_dict.json").exists()):
        saved = datasets.load_from_disk(str(place))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ValueError(f"{path} has no split {split!r}: it has {', '.join(saved)}")
            saved = saved[split]
        return saved.to_iterable_dataset() if streaming else saved
    source = str(place) if place else path
    try:
        if subset is None:
            # Some datasets require a configuration; "main" is the usual name of the default.
            names = datasets.get_dataset_config_names(source)
            subset = "main" if len(names) > 1 and "main" in names else None
        return datasets.load_dataset(source, subset, split=split, streaming=streaming)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        local = "" if place else ". If the hub cannot be reached, give a local .jsonl or .parquet file"
        raise type(error)(f"cannot load the dataset {path!r}: {reason}{local}") from error
