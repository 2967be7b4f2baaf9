"""Score tables as files: .npz, tidy Parquet, and the layout of the public Weaver data sets."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .aggregator import BROKEN
from .table import ScoreTable, families_by_name

COLUMNS = ("problem", "response", "label", "answer", "prompt", "text")
_FAMILIES = b"weaver_families"
_PANDAS_INDEX = "__index_level_"


def save_table(table: ScoreTable, path: Path) -> None:
    """Write by suffix. In Parquet there is one row a response: COLUMNS as far as known, then one column a verifier."""
    check_path(path, table.verifiers)
    with _aside(path) as aside:
        {".npz": _save_npz, ".parquet": _save_parquet}[path.suffix](table, aside)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A place to write to, renamed afterwards."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def check_path(path: str | Path, verifiers: Sequence[str] = ()) -> None:
    """ValueError, FileNotFoundError, ImportError: no table of these verifiers could be written there."""
    path = Path(path)
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"cannot write {path}: a score table is a .npz or a .parquet file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    if path.suffix == ".parquet":
        _arrow()
        if clash := sorted(set(COLUMNS) & set(verifiers)):
            raise ValueError(
                f"a verifier cannot be named {', '.join(clash)} in Parquet: the column has another meaning"
            )


def save_beside(source: Path, table: ScoreTable, name: str, path: Path) -> None:
    """Write `table`, which was loaded from `source` and has one more verifier now, called `name`.

    A tidy Parquet file stays as it is in Parquet, row by row, with that column beside its own.
    """
    check_path(path, table.verifiers)
    file = _read_parquet(source) if (source.suffix, path.suffix) == (".parquet", ".parquet") else None
    if file is None or "problem" not in file.column_names:
        return save_table(table, path)
    arrow, parquet = _arrow()
    at = tuple(np.array(_places(_keys(file))).T)
    column = arrow.array(table.scores[(*at, table.verifiers.index(name))], from_pandas=True)
    with _aside(path) as aside:
        parquet.write_table(file.append_column(name, column), aside)


def load_table(path: Path) -> ScoreTable:
    """Read by suffix. FileNotFoundError; ValueError if it is no score table; ImportError where pyarrow is missing."""
    if not path.is_file():
        raise FileNotFoundError(f"no such score table: {path}")
    if path.suffix == ".npz":
        return _load_npz(path)
    if path.suffix == ".parquet":
        return _load_parquet(path)
    raise ValueError(f"cannot read {path}: a score table is a .npz or a .parquet file")


def from_public(rows: Iterable[Mapping[str, Any]]) -> ScoreTable:
    """A table from rows of the public Weaver data sets (Saad-Falcon et al. 2025), one a problem.

    `<name>_scores` is a list of numbers, `<name>_verdicts` one of votes or of lists of votes, whose mean counts; None
    is missing. `answer_correct`, `extracted_answers`, `instruction` and `samples` become labels, answers, prompts and
    responses. Left out: scores of single steps, and those of the published ensemble itself.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("there are no rows")
    names = sorted({name for row in rows for name in row if name.endswith(("_scores", "_verdicts"))})
    names = [name for name in names if not name.endswith("_step_scores") and name != "weaver_scores"]
    if not names:
        raise ValueError("no column ends in _scores or _verdicts: these are not rows of the public Weaver layout")
    lists = [[row[name] for name in ("samples", *names) if row.get(name) is not None] for row in rows]
    counts = [max(map(len, found), default=0) for found in lists]
    scores = np.full((len(rows), max(counts), len(names)), np.nan)
    for i, row in enumerate(rows):
        for v, name in enumerate(names):
            values = row.get(name)
            if values is None:
                continue
            if len(values) != counts[i]:
                raise ValueError(f"problem {i}: {len(values)} values in {name} for {counts[i]} responses")
            scores[i, : counts[i], v] = [_number(value, f"problem {i}, {name}") for value in values]
    plain = [name.removesuffix("_scores").removesuffix("_verdicts") for name in names]
    verifiers = tuple(full if plain.count(short) > 1 else short for full, short in zip(names, plain, strict=True))
    present = np.arange(max(counts)) < np.array(counts)[:, None]
    return ScoreTable(
        scores,
        verifiers,
        labels=_padded([row.get("answer_correct") for row in rows], present),
        answers=_texts([row.get("extracted_answers") for row in rows], counts),
        prompts=_prompts([row.get("instruction") for row in rows]),
        responses=_texts([row.get("samples") for row in rows], counts),
        families=families_by_name(plain),
        present=present,
    )


def _number(value: Any, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value)
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        votes = [vote for vote in (_number(one, where) for one in value) if not math.isnan(vote)]
        return sum(votes) / len(votes) if votes else math.nan
    raise ValueError(f"{where}: {value!r} is not a score")


def _padded(lists: Sequence[Any], present: np.ndarray) -> np.ndarray | None:
    if all(found is None for found in lists):
        return None
    out = np.full(present.shape, np.nan)
    for i, found in enumerate(lists):
        if found is not None:
            if len(found) != present[i].sum():
                raise ValueError(f"problem {i} has {present[i].sum()} responses and {len(found)} labels")
            out[i, : len(found)] = _labels(found, f"problem {i}, answer_correct")
    return out


def _labels(found: Iterable[Any], where: str) -> list[float]:
    try:
        return [math.nan if one is None else float(one) for one in found]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: labels are 1, 0 or missing: {error}") from error


def _prompts(found: Sequence[Any]) -> list[str] | None:
    """One text a problem, "" where it is not known; None where none is."""
    if all(one is None for one in found):
        return None
    return ["" if one is None else str(one) for one in found]


def _texts(lists: Sequence[Any], counts: Sequence[int]) -> list[list[str]] | None:
    if all(found is None for found in lists):
        return None
    return [
        ["" if one is None else str(one) for one in (found if found is not None else [""] * count)]
        for found, count in zip(lists, counts, strict=True)
    ]


def _save_npz(table: ScoreTable, path: Path) -> None:
    texts = {
        name: getattr(table, name)
        for name in ("verifiers", "families", "answers", "prompts", "responses")
        if getattr(table, name) is not None
    }
    arrays = {"scores": table.scores, "present": table.present}
    if table.labels is not None:
        arrays["labels"] = table.labels
    with path.open("wb") as file:
        np.savez_compressed(file, texts=np.frombuffer(json.dumps(texts).encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]


def _load_npz(path: Path) -> ScoreTable:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        texts = json.loads(arrays.pop("texts").tobytes())
        if surplus := {*arrays, *texts} - {field.name for field in dataclasses.fields(ScoreTable)}:
            raise ValueError(f"it also has {', '.join(sorted(surplus))}")
        needed = arrays.pop("scores"), tuple(texts.pop("verifiers")), arrays.pop("present")
    except KeyError as error:
        raise ValueError(f"{path} is not a score table: it lacks {error}") from error
    except (TypeError, AttributeError, ValueError, OSError, EOFError, *BROKEN) as error:
        said = "it is no .npz file of numbers" if "allow_pickle" in str(error) else error
        raise ValueError(f"{path} is not a score table: {said}") from error
    scores, verifiers, present = needed
    try:
        return ScoreTable(scores, verifiers, present=present, **texts, **arrays)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a score table: {error}") from error


def _save_parquet(table: ScoreTable, path: Path) -> None:
    arrow, parquet = _arrow()
    problem = table.problem_of
    columns: dict[str, Any] = {
        "problem": problem,
        "response": np.concatenate([np.arange(count) for count in table.present.sum(1)]),
    }
    if table.labels is not None:
        columns["label"] = arrow.array(table.labels[table.present], from_pandas=True)
    if table.answers is not None:
        columns["answer"] = [answer for answers in table.answers for answer in answers]
    if table.prompts is not None:
        columns["prompt"] = [table.prompts[i] for i in problem]
    if table.responses is not None:
        columns["text"] = [text for texts in table.responses for text in texts]
    for name, column in zip(table.verifiers, table.flat.T, strict=True):
        columns[name] = arrow.array(column, from_pandas=True)
    families = None if table.families is None else dict(zip(table.verifiers, table.families, strict=True))
    made = arrow.table(columns).replace_schema_metadata({_FAMILIES: json.dumps(families)})
    parquet.write_table(made, path)


def _read_parquet(path: Path) -> Any:
    _, parquet = _arrow()
    try:
        with parquet.ParquetFile(path) as opened:
            return opened.read()
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


def _load_parquet(path: Path) -> ScoreTable:
    file = _read_parquet(path)
    try:
        return _from_parquet(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_parquet(file: Any) -> ScoreTable:
    arrow, _ = _arrow()
    if twice := sorted(name for name, count in Counter(file.column_names).items() if count > 1):
        raise ValueError(f"it has several columns called {', '.join(twice)}: give each a name of its own")
    kinds = arrow.types
    lists = [
        field.name
        for field in file.schema
        if kinds.is_list(field.type) or kinds.is_large_list(field.type) or kinds.is_fixed_size_list(field.type)
    ]
    if any(name.endswith(("_scores", "_verdicts")) for name in lists):
        return from_public(file.to_pylist())
    if "problem" not in file.column_names:
        raise ValueError(f"it has neither a column problem nor lists of scores: {', '.join(file.column_names)}")
    verifiers = [name for name in file.column_names if name not in COLUMNS and not name.startswith(_PANDAS_INDEX)]
    odd = [name for name in verifiers if not _is_number(arrow, file.schema.field(name).type)]
    if odd or not verifiers:
        raise ValueError(f"it needs one column of numbers a verifier: {', '.join(odd) or 'it has none'}")
    columns = _keys(file) | {name: file[name].to_pylist() for name in COLUMNS[2:] if name in file.column_names}
    places = _places(columns)
    shape = (max(i for i, _ in places) + 1, max(j for _, j in places) + 1)
    rows, at = np.arange(len(places)), tuple(np.array(places).T)
    row_of = np.full(shape, -1)
    row_of[at] = rows
    present = row_of >= 0
    order = row_of[present]

    def spread(values: np.ndarray) -> np.ndarray:
        out = np.full((*shape, *values.shape[1:]), np.nan)
        out[at] = values
        return out

    def lists_of(name: str) -> list[list[str]] | None:
        if name not in columns:
            return None
        return [["" if columns[name][r] is None else str(columns[name][r]) for r in row[row >= 0]] for row in row_of]

    # Integers beyond 2^53 are rounded, as floats are.
    numbers = [file[name].cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False) for name in verifiers]
    told = (file.schema.metadata or {}).get(_FAMILIES)
    by_name = dict(zip(verifiers, families_by_name(verifiers), strict=True))
    families = by_name if told is None else json.loads(told)
    labels = None
    if "label" in columns:
        labels = spread(np.array(_labels(columns["label"], "column label")))
    table = ScoreTable(
        spread(np.stack(numbers, axis=1)),
        tuple(verifiers),
        labels=labels,
        answers=lists_of("answer"),
        responses=lists_of("text"),
        families=None if families is None else tuple(families.get(name, name) for name in verifiers),
        present=present,
    )
    if "prompt" in columns:
        prompts = [columns["prompt"][r] for r in order]
        firsts = [prompts[start] for start in np.flatnonzero(np.diff(table.problem_of, prepend=-1))]
        if any(prompts[k] != firsts[i] for k, i in enumerate(table.problem_of)):
            raise ValueError("one problem has several prompts")
        table.prompts = _prompts(firsts)
    return table


def _keys(file: Any) -> dict[str, list[Any]]:
    """Which problem each row is of, and which response it is as far as that is said."""
    keys = {name: file[name].to_pylist() for name in ("problem", "response") if name in file.column_names}
    for name, column in keys.items():
        # NaN is not equal to itself.
        if any(one is None or one != one or isinstance(one, list | dict) for one in column):
            raise ValueError(f"the column {name} has rows without a number or a name")
    return keys


def _places(columns: Mapping[str, list[Any]]) -> list[tuple[int, int]]:
    """(problem, response) of each row: problems by first appearance, responses by their number or by order."""
    problems: dict[Any, int] = {}
    of_problem: dict[int, list[tuple[Any, int]]] = {}
    for row, problem in enumerate(columns["problem"]):
        i = problems.setdefault(problem, len(problems))
        of_problem.setdefault(i, []).append((columns["response"][row] if "response" in columns else row, row))
    places = [(0, 0)] * len(columns["problem"])
    for name, i in problems.items():
        numbers = [number for number, _ in of_problem[i]]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"problem {name} has several responses of one number")
        for j, (_, row) in enumerate(sorted(of_problem[i])):
            places[row] = (i, j)
    if not places:
        raise ValueError("the table has no rows")
    return places


def _is_number(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind)


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet needs the pyarrow package: pip install 'torchforge[data]'") from error
    return pyarrow, pyarrow.parquet
