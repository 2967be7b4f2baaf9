"""Score table files: .npz, tidy Parquet, and the layout of the public Weaver data sets."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge.system.files import written_aside

from .table import ScoreTable, families_by_name

if TYPE_CHECKING:
    import pyarrow

# Errors of a damaged Parquet file, beside pyarrow's own.
_DAMAGED = (
    ValueError,
    OSError,
    NotImplementedError,
    TypeError,
    LookupError,
    OverflowError,
    MemoryError,
    RecursionError,
)
COLUMNS = ("problem", "response", "label", "answer", "prompt", "text")
_FAMILIES = b"weaver_families"
_PANDAS_INDEX = "__index_level_"


def check_path(path: str | Path, verifiers: Sequence[str] = ()) -> None:
    """Check that a table of these verifiers can be written to `path`.

    Raises:
        ValueError: unsupported suffix, or a verifier has the name of a reserved Parquet column.
        FileNotFoundError: the folder does not exist.
        ImportError: Parquet without pyarrow.
    """
    path = Path(path)
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"cannot write {path}: a score table is a .npz or a .parquet file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    if path.suffix == ".parquet":
        _arrow()
        if clash := sorted(set(COLUMNS) & set(verifiers)):
            raise ValueError(f"{', '.join(clash)}: reserved column name in Parquet, rename the verifier")


def save_table(table: ScoreTable, path: Path) -> None:
    """Write by suffix. Parquet has one row per response: the known COLUMNS, then one column per verifier."""
    check_path(path, table.verifiers)
    with written_aside(path) as aside:
        if path.suffix == ".parquet":
            _save_parquet(table, aside)
        else:
            texts = {
                name: value
                for name in ("verifiers", "families", "answers", "prompts", "responses")
                if (value := getattr(table, name)) is not None
            }
            # Texts as JSON, numbers as arrays: nothing is pickled.
            arrays = {"scores": table.scores, "present": table.present}
            if table.labels is not None:
                arrays["labels"] = table.labels
            write_npz(aside, {"texts": texts}, arrays)


def save_beside(source: Path, table: ScoreTable, name: str, path: Path) -> None:
    """Write `table`, loaded from `source` and extended by the verifier `name`.

    From tidy Parquet to Parquet the source's rows and columns are kept, with one column appended.
    """
    check_path(path, table.verifiers)
    file = _read_parquet(source) if (source.suffix, path.suffix) == (".parquet", ".parquet") else None
    if file is None or "problem" not in file.column_names:
        return save_table(table, path)
    arrow, parquet = _arrow()
    column = arrow.array(table.scores[(*_places(file), table.verifiers.index(name))], from_pandas=True)
    with written_aside(path) as aside:
        parquet.write_table(file.append_column(name, column), aside)


def load_table(path: Path) -> ScoreTable:
    """Read by suffix.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a score table.
        ImportError: Parquet without pyarrow.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such score table: {path}")
    # Both formats are read within a guard: a damaged file raises almost anything.
    if path.suffix == ".npz":
        with reading_npz(path, "score table") as arrays:
            columns: dict[str, Any] = {**json.loads(arrays.pop("texts").tobytes()), **arrays}
            fields = {field.name for field in dataclasses.fields(ScoreTable)}
            if surplus := columns.keys() - fields:
                raise ValueError(f"it also has {', '.join(sorted(surplus))}")
            present = columns.pop("present")
            return ScoreTable(columns.pop("scores"), columns.pop("verifiers"), present=present, **columns)
    if path.suffix == ".parquet":
        file = _read_parquet(path)
        try:
            return _from_parquet(file)
        except (*_DAMAGED, _arrow()[0].ArrowException) as error:
            raise ValueError(f"{path}: {error}") from error
    raise ValueError(f"cannot read {path}: a score table is a .npz or a .parquet file")


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


def _save_parquet(table: ScoreTable, path: Path) -> None:
    arrow, parquet = _arrow()
    columns: dict[str, Any] = dict(zip(("problem", "response"), np.nonzero(table.present), strict=True))
    if table.labels is not None:
        columns["label"] = arrow.array(table.labels[table.present], from_pandas=True)
    if table.answers is not None:
        columns["answer"] = [answer for answers in table.answers for answer in answers]
    if table.prompts is not None:
        columns["prompt"] = [table.prompts[i] for i in table.problem_of]
    if table.responses is not None:
        columns["text"] = [text for texts in table.responses for text in texts]
    for name, column in zip(table.verifiers, table.flat.T, strict=True):
        columns[name] = arrow.array(column, from_pandas=True)
    # Families are not a column of responses: they go into the schema's metadata.
    families = None if table.families is None else dict(zip(table.verifiers, table.families, strict=True))
    metadata = {_FAMILIES: json.dumps(families)}
    parquet.write_table(arrow.table(columns).replace_schema_metadata(metadata), path)


def _read_parquet(path: Path) -> pyarrow.Table:
    arrow, parquet = _arrow()
    try:
        with parquet.ParquetFile(path) as opened:
            return opened.read()
    except (*_DAMAGED, arrow.ArrowException) as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


def _from_parquet(file: pyarrow.Table) -> ScoreTable:
    arrow, _ = _arrow()
    names, types = file.column_names, arrow.types
    if duplicates := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"it has several columns called {', '.join(duplicates)}: column names must be unique")
    # Two layouts: lists of scores, one row a problem, or one row a response.
    lists = [field.name for field in file.schema if types.is_nested(field.type)]
    if any(name.endswith(("_scores", "_verdicts")) for name in lists):
        return from_public(file.to_pylist())
    if "problem" not in names:
        raise ValueError(f"it has neither a column problem nor lists of scores: {', '.join(names)}")
    verifiers = [name for name in names if name not in COLUMNS and not name.startswith(_PANDAS_INDEX)]
    numeric = (types.is_floating, types.is_integer, types.is_boolean, types.is_null)
    not_numeric = [name for name in verifiers if not any(test(file.schema.field(name).type) for test in numeric)]
    if not_numeric or not verifiers:
        raise ValueError(f"it needs one column of numbers a verifier: {', '.join(not_numeric) or 'it has none'}")

    places = _places(file)
    present = np.zeros(tuple(index.max() + 1 for index in places), dtype=bool)
    present[places] = True
    # The rows of each problem, in the order of its responses.
    rows_of = np.split(np.lexsort(places[::-1]), np.cumsum(present.sum(1))[:-1])

    def spread(values: np.ndarray) -> np.ndarray:
        out = np.full((*present.shape, *values.shape[1:]), np.nan)
        out[places] = values
        return out

    def texts(name: str) -> list[list[str]] | None:
        if name not in names:
            return None
        column = file[name].to_pylist()
        return [[_text(column[row]) for row in rows] for rows in rows_of]

    prompts = None
    if "prompt" in names:
        column = file["prompt"].to_pylist()
        if any(column[row] != column[rows[0]] for rows in rows_of for row in rows):
            raise ValueError("one problem has several prompts")
        prompts = [_text(column[rows[0]]) for rows in rows_of] if file["prompt"].null_count < len(column) else None
    families = dict(zip(verifiers, families_by_name(verifiers), strict=True))
    if (saved := (file.schema.metadata or {}).get(_FAMILIES)) is not None:
        families = json.loads(saved)
    # Integers beyond 2^53 are rounded to floats.
    scores = [file[name].cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False) for name in verifiers]
    return ScoreTable(
        spread(np.stack(scores, axis=1)),
        tuple(verifiers),
        labels=spread(np.array(_labels(file["label"].to_pylist(), "column label"))) if "label" in names else None,
        answers=texts("answer"),
        prompts=prompts,
        responses=texts("text"),
        families=None if families is None else tuple(families.get(name, name) for name in verifiers),
        present=present,
    )


def _places(file: pyarrow.Table) -> tuple[np.ndarray, np.ndarray]:
    """Indices (problem, response) of each row: problems by first appearance, responses by number or else by order."""
    keys = {name: file[name].to_pylist() for name in ("problem", "response") if name in file.column_names}
    for name, column in keys.items():
        if any(value is None or value != value or isinstance(value, list | dict) for value in column):  # != is NaN
            raise ValueError(f"the column {name} has rows without a number or a name")
    if not keys["problem"]:
        raise ValueError("the table has no rows")

    numbers = keys.get("response", range(len(keys["problem"])))
    # Rows may come in any order: those of a problem are sorted by their number.
    rows_of: dict[Any, list[tuple[Any, int]]] = {}
    for row, (problem, number) in enumerate(zip(keys["problem"], numbers, strict=True)):
        rows_of.setdefault(problem, []).append((number, row))
    places = np.empty((2, len(keys["problem"])), dtype=int)
    for i, (problem, rows) in enumerate(rows_of.items()):
        if len({number for number, _ in rows}) < len(rows):
            raise ValueError(f"problem {problem} has several responses of one number")
        for j, (_, row) in enumerate(sorted(rows)):
            places[:, row] = i, j
    return places[0], places[1]


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet needs the pyarrow package: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
