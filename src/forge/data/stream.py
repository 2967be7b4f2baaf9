"""The base of datasets: a resumable stream of items made from rows, which are checked when it is opened."""

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from ..models.tokenizer import smaller_vocabulary
from ..types import Pair, Sample
from .config import RowsConfig
from .files import PathOrRows, Row, open_rows, open_stream
from .messages import check_media
from .sources import Position, SampledRows, StoredRows, StreamedRows, TaskRows

T = TypeVar("T")
C = TypeVar("C", bound=RowsConfig)
_PROBE = 1000  # rows of a stream that are read until one is usable; that many bad ones in a row are no accident
_CHECKED = 20_000  # stored rows that are made before a run: 3 s for prompts, 130 s for conversations of six messages
_LOGGED = 10  # invalid rows that are logged one by one

log = logging.getLogger(__name__)


class BadRow(ValueError):
    """Error: no item can be made of a row; names the row's source and number."""


class TooLong(ValueError):
    """Error: an item exceeds its limit and `too_long` is "error"."""


class RowStream(ABC, Generic[T, C]):
    """An iterator of items made from rows; iteration ends after `epochs`, or never.

    The constructor makes an item of each row once, so that an invalid row is an error before a run starts: of stored
    rows all (if epochs count them or a long row is an error) or the first 20,000, of streams and tasks the first ones.
    While iterating, and in streams always, an invalid row is left out, counted and logged.

    Subclasses set SECTION and define `begin` and `make`; their constructors end with a call of `check`.

    Args:
        path: a file, a folder that `datasets` can load, a Hugging Face id, or rows, see `forge.data.files.open_rows`.
        tokenizer: of the policy.
        seed: determines the order, and a task's rows.
        epochs: passes over the data; None is endless. A task takes None only.
        checked: whether another process has already checked the rows.
        **settings: fields of SECTION.

    Attributes:
        epochs: as given.
        size: number of items of all epochs together; None: endless, or unknown.
        served: number of items returned so far.
        skipped: number of rows left out so far.

    Raises:
        ValueError, FileNotFoundError, ImportError: one line, which numbers rows from 1.
    """

    SECTION: type[C]
    NOUN, LIMIT = "row", "max_tokens"  # what an item and its limit are called in messages

    def __init__(
        self,
        path: PathOrRows = None,
        *,
        tokenizer: Any,
        seed: int = 0,
        epochs: int | None = None,
        checked: bool = False,
        **settings: Any,
    ) -> None:
        # Sections are strict: a list, as in YAML.
        if isinstance(settings.get("difficulty"), tuple):
            settings["difficulty"] = list(settings["difficulty"])
        self.settings = section = self.SECTION(path=path, **settings)
        path = section.path
        if section.sources is not None:
            raise ValueError("this class reads one source: open dataset.sources with load_data")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {epochs}")
        if epochs is not None and section.task is not None:
            raise ValueError(
                "dataset.epochs cannot be set with dataset.task, which generates rows without end: omit it"
            )

        self.tokenizer, self.seed, self.epochs = tokenizer, seed, epochs
        self._limit: int | None = section[self.LIMIT]
        self._too_long: str = section["too_long"]
        self._vocabulary = smaller_vocabulary(tokenizer) or math.inf

        # Columns that the prompt's template or a setting such as `text_field` names.
        fields = (str(section[name]) for name in type(section).model_fields if name.endswith("_field"))
        self._named = {*re.findall(r"\{(\w+)\}", section.prompt_template), *fields}
        self._name = section.task or (path if isinstance(path, str) else "dataset")
        self._source: StoredRows | StreamedRows | TaskRows
        sampler = getattr(section, "sampler", None)  # only the section of prompts has this setting
        if sampler is not None and (section.task is not None or section.streaming or epochs is not None):
            raise ValueError(
                "dataset.sampler needs stored rows without epochs: omit dataset.task, dataset.streaming and "
                "dataset.epochs"
            )

        # What decides about the rows and their order: a saved position fits only data with the same identity.
        self._identity: Position = {
            "task": section.task,
            "split": section.split,
            "seed": seed,
            "shuffle": section.shuffle,
        }

        # A task is endless, a stream is read as needed, stored rows have random access.
        if section.task is not None:
            self._source = TaskRows(section.task, split=section.split, seed=seed, difficulty=section.difficulty)
            self._identity["difficulty"] = section.difficulty
        elif section.streaming and isinstance(path, str):
            self._source = StreamedRows(
                lambda: open_stream(path, split=section.split, subset=section.subset),
                shuffle=section.shuffle,
                seed=seed,
            )
        else:
            rows = open_rows(path, split=section.split, subset=section.subset)  # type: ignore[arg-type]
            self._source = (
                StoredRows(rows, shuffle=section.shuffle, seed=seed)
                if sampler is None
                else SampledRows(rows, sampler, seed=seed)
            )
            self._identity["rows"] = len(rows)

        self.served, self.skipped = 0, 0
        self.size: int | None = None
        self._checked = checked
        self._bad, self._logged = 0, 0  # invalid rows: those since the last item, and those that were logged
        self._reasons: list[str] = []
        self._items: set[int] = set()  # hashes of the items that were checked

    def begin(self, row: Row) -> None:
        """Choose the form of all rows from the first one, before `make` is called; the base class has only one form."""

    @abstractmethod
    def make(self, number: int, row: Row, index: int) -> T | None:
        """Return the item that a row becomes, or None if it is skipped (see `leave_out`).

        Args:
            number: of the row, from 1.
            index: of the item, from 0; rows that are left out do not count.

        Raises:
            ValueError: the row is malformed.
        """

    @property
    def epoch(self) -> int:
        """Return the number of completed epochs of the dataset."""
        return self._source.epoch

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        # Read rows until one makes an item.
        while self.epochs is None or self.epoch < self.epochs:
            numbered = self._source.read()
            if numbered is None:  # the end of an epoch
                continue

            try:
                item = self._make_item(*numbered, index=self.served)
            except BadRow as error:
                self._leave_out_bad(error)
                item = None

            if item is not None:
                self._bad = 0
                if isinstance(self._source, SampledRows):
                    self._source.issue(self.served)
                self.served += 1
                return item

            self.skipped += 1
            if isinstance(self._source, SampledRows):
                self._source.exclude()

        raise StopIteration

    def observe(self, outcomes: Mapping[int, Sequence[float]]) -> None:
        """Pass the outcomes of samples on to the sampler, if there is one.

        Args:
            outcomes: {index of a sample: outcomes of its group of answers}.
        """
        if isinstance(self._source, SampledRows):
            self._source.observe(outcomes)

    def _leave_out_bad(self, error: BadRow) -> None:
        """Count and log a bad row. BadRow: it is the 1000th in succession, so data or settings are probably wrong."""
        self._bad += 1
        self._logged += 1
        if self._bad >= _PROBE:
            raise error
        if self._logged <= _LOGGED:
            last_note = "; additional ones are only counted" if self._logged == _LOGGED else ""
            log.warning("skipped a row: %s%s", error, last_note)

    def held_out(self, n: int) -> list[T]:
        """Return n items for evaluation, the same at every call: the first rows of the split in stored order, or
        distinct questions of a task's test split.

        Raises:
            ValueError: there are fewer than n, without those that are too long.
        """
        source = self._source
        rows = source.held_out(n) if isinstance(source, TaskRows) else source.scan()
        items: list[T] = []
        while len(items) < n and (numbered := next(rows, None)) is not None:
            if (item := self._make_item(*numbered, index=len(items))) is not None:
                items.append(item)

        if len(items) < n:
            exclusion = f" that are not {' or '.join(self._reasons)}" if self._reasons else ""
            raise ValueError(
                f"{self._name}: {n} held-out samples are needed, but only {len(items)} {self.NOUN}s are "
                f"available{exclusion}: lower eval.problems (or problems of the set) to {len(items)}"
            )

        return items

    def rows(self) -> Iterator[Row]:
        """Return an iterator of all stored rows in their order, or of the first 1000 rows of a stream or task."""
        limit = None if isinstance(self._source, StoredRows) else _PROBE
        return (row for _, row in islice(self._source.scan(), limit))

    def state_dict(self) -> Position:
        """Return the position in the data as plain JSON, for `load_state_dict`."""
        return {
            "identity": self._identity,
            "source": self._source.state(),
            "served": self.served,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Position) -> None:
        """Continue where `state_dict` returned this state. ValueError: it is of other data or of another order."""
        for name in {**self._identity, **state["identity"]}:
            saved = state["identity"].get(name)
            current = self._identity.get(name)
            if saved != current:
                raise ValueError(
                    f"{self._name}: the saved data position is of {name} {saved!r}, but it is {current!r} now: resume "
                    "with the same data"
                )

        self._source.load(state["source"])
        self.served = state["served"]
        self.skipped = state["skipped"]

    def fits(self, tokens: int) -> bool:
        """Return whether an item of this many tokens is within the limit; if not, record it as left out.

        Raises:
            TooLong: it is not, and `too_long` is "error".
        """
        if self._limit is None or tokens <= self._limit:
            return True
        if self._too_long == "error":
            raise TooLong(f"the {self.NOUN} has {tokens} tokens, {self.LIMIT} is {self._limit}")
        self.leave_out(f"longer than {self.LIMIT}={self._limit}")
        return False

    def leave_out(self, reason: str) -> None:
        """Record the reason for which `make` skips a row, for messages.

        Args:
            reason: completes "the rows are", such as "longer than max_tokens=9".
        """
        if reason not in self._reasons:
            self._reasons.append(reason)

    def _make_item(self, number: int, row: Row, *, index: int) -> T | None:
        # None for a row that is left out; an error names the dataset and the row.
        try:
            check_media(row, self._named, "the row")
            item = self.make(number, row, index)
            largest = -1 if item is None else max(max(ids, default=0) for ids in content_of(item))
            if largest >= self._vocabulary:
                raise ValueError(
                    f"the text has the token {self.tokenizer.convert_ids_to_tokens(largest)!r} with id {largest}, "
                    f"beyond the model's vocabulary of {self._vocabulary}: use the model's own tokenizer, or resize "
                    "its embeddings"
                )
            return item
        except TooLong as error:
            raise ValueError(f"{self._name}, row {number}: {error}") from error
        except Exception as error:  # rows have every form that their authors thought of
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise BadRow(f"{self._name}, row {number}: {reason}") from error

    def check(self) -> None:
        """Choose the form of the rows, and make items of all rows, to find errors before a run starts.

        Of streams and tasks it makes the first 100 rows, or up to 1000 until one makes an item.

        Raises:
            ValueError: there is no row, no row makes an item, or a stored row is malformed.
        """
        for _, row in islice(self._source.scan(), 1):
            self.begin(row)
        if self._checked:
            return

        # All rows where the number of items matters or a long one is an error; else enough to find a wrong setting.
        is_stored = isinstance(self._source, StoredRows)
        scanned = self._source.scan() if is_stored else islice(self._source.scan(), _PROBE)
        needs_all = self.epochs is not None or (self._limit is not None and self._too_long == "error")
        enough: float = _PROBE // 10
        if is_stored:
            enough = math.inf if needs_all else _CHECKED

        # Some tokenizers use eos or bos as the unknown token: such a token does not show unknown characters.
        unknown_token = self.tokenizer.unk_token_id
        if unknown_token in (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id):
            unknown_token = None

        rows, items = 0, 0
        left_out: list[int] = []
        unknown: list[int] = []
        fault: BadRow | None = None  # the first one
        for number, row in scanned:
            if items and rows >= enough:
                break
            rows += 1
            try:
                item = self._make_item(number, row, index=0)
            except BadRow as error:
                if not isinstance(self._source, StreamedRows):
                    raise
                fault = fault or error
                continue

            if item is None:
                left_out.append(number)
                continue
            items += 1
            self._items.add(hash_item(item))
            if any(unknown_token in tokens for tokens in content_of(item)):
                unknown.append(number)

        # Without an item there is nothing to train on, which is an error; rows that are left out are a warning.
        reasons = " or ".join(self._reasons)
        if not rows:
            raise ValueError(f"{self._name} is empty: it has no rows")
        if not items:
            raise fault or ValueError(f"{self._name}: no row is usable, because all {rows} {self.NOUN}s are {reasons}")

        if left_out:
            counts = self._name, len(left_out), rows, self.NOUN, reasons, left_out[0]
            log.warning("%s: %d of %d %ss are skipped because they are %s (first: row %d)", *counts)

        if unknown:
            log.warning(
                "%s: %d of %d %ss have characters that the tokenizer encodes as unknown (first: row %d)",
                *(self._name, len(unknown), rows, self.NOUN, unknown[0]),
            )

        if is_stored and self.epochs is not None:
            self.size = items * self.epochs

    def has(self, item: object) -> bool:
        """Return whether an item has the same tokens and images as an item made by `check`."""
        return hash_item(item) in self._items


def content_of(item: Any) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of an item as a tuple of sequences: of a sample its prompt, of an episode itself, of a pair
    both episodes."""
    if isinstance(item, Sample):
        return (tuple(item.prompt.token_ids),)
    episodes = item if isinstance(item, Pair) else [item]
    return tuple(tuple(episode.tokens) for episode in episodes)


def hash_item(item: Any) -> int:
    """Return a hash of an item's tokens and images."""
    owner = item.prompt if isinstance(item, Sample) else item
    return hash((content_of(item), getattr(owner, "images", ())))
