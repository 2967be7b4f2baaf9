"""The score table: problems x responses x verifiers, and its files."""

import dataclasses
import json
import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from forge.system.files import written_aside
from forge.types import Conversation

READINGS = re.compile(r"_(min|max|mean|avg|last)$")  # suffixes of verifiers that read one model's output differently


@dataclasses.dataclass
class ScoreTable:
    """Scores of many responses by many verifiers, validated on construction. Arrays are not copied: do not modify them.

    Args:
        scores: [problems, responses, verifiers], each verifier on its own scale; NaN for missing.
        verifiers: unique names.
        labels: [problems, responses] 1 for right, 0 for wrong, NaN for unknown.
        answers: final answer of each response, "" for none; used for voting.
        prompts, responses: texts, used for distillation; "" for an unknown prompt.
        families: one name per verifier; verifiers of one family are related, such as readings of one model.
            See `families_by_name`.
        present: [problems, responses] bool, True up to a problem's last response; all by default. Lists (answers,
            responses) hold only present responses.

    Raises:
        ValueError: mismatched shapes, infinite scores, labels other than 0, 1 and NaN, duplicate names, a problem
            without responses, or scores of absent responses.
    """

    scores: np.ndarray
    verifiers: tuple[str, ...]
    labels: np.ndarray | None = None
    answers: list[list[str]] | None = None
    prompts: list[str] | None = None
    responses: list[list[str]] | None = None
    families: tuple[str, ...] | None = None
    present: np.ndarray = None  # type: ignore[assignment]  # filled in by __post_init__

    def __post_init__(self) -> None:
        self.scores = np.asarray(self.scores, dtype=np.float64)
        if self.scores.ndim != 3 or 0 in self.scores.shape:
            raise ValueError(f"scores must be non-empty [problems, responses, verifiers], got {self.scores.shape}")
        shape, width = self.scores.shape[:2], self.scores.shape[2]

        names = tuple(map(str, self.verifiers))
        if len(names) != width:
            raise ValueError(f"{len(names)} names for {width} score columns: give one for each")
        duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
        if duplicates or "" in names:
            raise ValueError(f"verifier names must be unique and non-empty: {', '.join(duplicates) or repr('')}")
        self.verifiers = names
        self.families = None if self.families is None else tuple(self.families)

        # Responses come first in each problem, padding after them.
        self.present = np.ones(shape, dtype=bool) if self.present is None else np.asarray(self.present, dtype=bool)
        if (self.present[:, 1:] & ~self.present[:, :-1]).any() or not self.present[:, 0].all():
            raise ValueError("present must be True from each problem's first response to its last, and False after it")

        # Infinite scores break quantiles, and a score of padding would be counted.
        if np.isinf(self.scores).any():
            i, j, v = np.argwhere(np.isinf(self.scores))[0]
            raise ValueError(f"{names[v]} gave problem {i}, response {j} an infinite score: use NaN for missing")

        if not np.isnan(self.scores[~self.present]).all():
            raise ValueError("scores of responses that are not present must be NaN")

        if self.labels is not None:
            self.labels = np.asarray(self.labels, dtype=np.float64)
            if self.labels.shape != shape:
                raise ValueError(f"labels are {self.labels.shape} and responses {shape}")
            check_labels(self.labels)
            # Labels often come as rectangular arrays of 0 and 1: mask the padding.
            self.labels = np.where(self.present, self.labels, np.nan)

        # Texts belong to present responses.
        if self.prompts is not None and len(self.prompts) != len(self):
            raise ValueError(f"{len(self.prompts)} prompts for {len(self)} problems")
        for name, lists in (("answers", self.answers), ("responses", self.responses)):
            if lists is None:
                continue
            if len(lists) != len(self):
                raise ValueError(f"{name} of {len(lists)} problems, the table has {len(self)}")
            for i, (texts, count) in enumerate(zip(lists, self.present.sum(1), strict=True)):
                if len(texts) != count:
                    raise ValueError(f"problem {i} has {count} responses and {len(texts)} {name}")

    def __len__(self) -> int:
        """Return the number of problems."""
        return len(self.scores)

    @property
    def problem_of(self) -> np.ndarray:
        """Return the index of each present response's problem, [present responses], in the order of `flat`."""
        return np.repeat(np.arange(len(self)), self.present.sum(1))

    @property
    def flat(self) -> np.ndarray:
        """Return the scores of the present responses, [present responses, verifiers], problem by problem."""
        return self.scores[self.present]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return one value per present response, in the order of `flat`, as [problems, responses]; NaN elsewhere."""
        spread = np.full(self.present.shape, np.nan)
        spread[self.present] = values
        return spread

    def labelled_problems(self) -> np.ndarray:
        """Return the indices of the problems with at least one known label."""
        return np.flatnonzero([] if self.labels is None else ~np.isnan(self.labels).all(1))

    def take(self, problems: Sequence[int] | np.ndarray) -> Self:
        """Return a table of the problems selected by indices (in that order) or by a mask."""
        indices = np.arange(len(self))[np.asarray(problems)]
        columns: dict[str, Any] = {"scores": self.scores[indices], "present": self.present[indices]}
        if self.labels is not None:
            columns["labels"] = self.labels[indices]
        texts = {name: getattr(self, name) for name in ("answers", "prompts", "responses")}
        columns |= {name: [rows[i] for i in indices] for name, rows in texts.items() if rows is not None}
        return dataclasses.replace(self, **columns)

    def with_labels_of(self, problems: Sequence[int] | np.ndarray) -> Self:
        """Return a copy of the table with only the labels of the given problems (indices or a mask); all others become
        NaN.

        Raises:
            ValueError: the table has no labels.
        """
        if self.labels is None:
            raise ValueError("the table has no labels to keep")
        # An empty list would become an array of floats, which is not an index.
        indices = np.arange(len(self))[np.asarray(problems, dtype=None if len(problems) else int)]
        labels = np.full_like(self.labels, np.nan)
        labels[indices] = self.labels[indices]
        return dataclasses.replace(self, labels=labels)

    def select(self, verifiers: Sequence[str]) -> Self:
        """Return a table with only the columns of the given verifiers, in this order. ValueError: the table lacks a
        verifier."""
        missing = [name for name in verifiers if name not in self.verifiers]
        if missing:
            raise ValueError(f"the table has no scores of {', '.join(missing)}: it has {', '.join(self.verifiers)}")
        columns = [self.verifiers.index(name) for name in verifiers]
        families = None if self.families is None else tuple(self.families[c] for c in columns)
        return dataclasses.replace(
            self, scores=self.scores[:, :, columns], verifiers=tuple(verifiers), families=families
        )

    def with_verifier(self, name: str, scores: np.ndarray) -> Self:
        """Return a table with one more verifier, in a new family, whose scores are [problems, responses]."""
        return dataclasses.replace(
            self,
            scores=np.concatenate([self.scores, scores[:, :, None]], axis=2),
            verifiers=(*self.verifiers, name),
            families=None if self.families is None else (*self.families, name),
        )

    def save(self, path: str | Path) -> None:
        """Write a .npz file atomically; `load` reads it."""
        check_path(path)
        # Texts as JSON, numbers as arrays: nothing is pickled.
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        arrays = {name: value for name, value in columns.items() if isinstance(value, np.ndarray)}
        texts = {name: value for name, value in columns.items() if name not in arrays and value is not None}
        if any(isinstance(prompt, Conversation) for prompt in self.prompts or ()):
            texts["rows"] = [Conversation(prompt).row for prompt in self.prompts or ()]
        with written_aside(Path(path)) as aside:
            write_npz(aside, {"texts": texts}, arrays)

    @staticmethod
    def load(path: str | Path) -> "ScoreTable":
        """Return the table in a file that `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a score table.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"score table file {path} does not exist")
        with reading_npz(path, "score table") as arrays:
            columns: dict[str, Any] = {**json.loads(arrays.pop("texts").tobytes()), **arrays}
            if "rows" in columns:
                pairs = zip(columns["prompts"], columns.pop("rows"), strict=True)
                columns["prompts"] = [Conversation(text, row) for text, row in pairs]
            fields = {field.name for field in dataclasses.fields(ScoreTable)}
            if surplus := columns.keys() - fields:
                raise ValueError(f"the file also has {', '.join(sorted(surplus))}")
            return ScoreTable(
                columns.pop("scores"), columns.pop("verifiers"), present=columns.pop("present"), **columns
            )


def families_by_name(verifiers: Sequence[str]) -> tuple[str, ...]:
    """Return the family of each verifier by its name: `x_min`, `x_max`, `x_mean`, `x_avg` and `x_last` are of family x.

    >>> families_by_name(["gpt_mean", "gpt_max", "rule"])
    ('gpt', 'gpt', 'rule')
    """
    return tuple(READINGS.sub("", name) for name in verifiers)


def check_labels(labels: np.ndarray) -> None:
    """Check that every label is 1, 0 or NaN. ValueError: a label has another value."""
    wrong = labels[(labels != 0) & (labels != 1) & ~np.isnan(labels)]
    if wrong.size:
        raise ValueError(f"labels must be 1 (right), 0 (wrong) or NaN (unknown), got {wrong[0]}")


def check_path(path: str | Path) -> None:
    """Check that a table can be written to `path`.

    Raises:
        ValueError: its suffix is not .npz.
        FileNotFoundError: its folder does not exist.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"cannot write {path}: a score table is a .npz file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the directory {path.parent} does not exist")


def write_npz(path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a .npz file of `arrays` and, as one more array of bytes each, the values of `header` in JSON."""
    encoded = {name: np.frombuffer(json.dumps(value).encode(), dtype=np.uint8) for name, value in header.items()}
    with path.open("wb") as file:  # savez appends .npz to a bare path
        np.savez_compressed(file, **encoded, **arrays)  # type: ignore[arg-type]


@contextmanager
def reading_npz(path: Path, kind: str) -> Iterator[dict[str, np.ndarray]]:
    """Yield the arrays of a .npz file by name, and report errors of the block as errors of a `kind` of file.

    Raises:
        ValueError: the file is damaged, or the body fails because it is not the file of a `kind`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            yield {name: file[name] for name in file.files}
    except KeyError as error:
        raise ValueError(f"{path} is not a {kind}: it lacks {error}") from error
    except (
        *(TypeError, AttributeError, ValueError, OSError, EOFError),
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError),  # damaged zip files
        *(RecursionError, MemoryError, OverflowError, IndexError, RuntimeError, SyntaxError),  # odd headers
    ) as error:
        reason = "not a .npz file of numbers" if "allow_pickle" in str(error) else error
        raise ValueError(f"{path} is not a {kind}: {reason}") from error
