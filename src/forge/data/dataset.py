"""The dataset a run draws prompts from: any source, rendered, tokenised, resumable at every position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from forge.data import tasks
from forge.data.files import Row, open_rows, open_stream
from forge.data.prompts import PromptFormat
from forge.data.sources import Source, StoredRows, StreamedRows, TaskRows
from forge.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = 1000


class PromptDataset:
    """An iterator of `Sample(prompt, target)`; iteration ends after `epochs`, or never.

    Every problem that can be known is raised by the constructor, as a ValueError, FileNotFoundError or ImportError
    of one line: all rows of a local file are checked, the columns and the first row of everything else. Rows count
    from 1.

    Args:
        path: a .json, .jsonl or .parquet file, a folder that `datasets` can load, or a Hugging Face id.
        task: a procedural task (see `tasks`) instead of a path.
        difficulty: of the procedural task: an int, or a pair (low, high).
        split: of a folder, hub id or task; a single file is one split whatever this says.
        subset: the configuration of a hub dataset that has several.
        streaming: read rows as they are needed; shuffling then happens within blocks of 1000 rows.
        shuffle: a new order every epoch, by (seed, epoch). Procedural tasks are random in any case.
        epochs: passes over the data; None is endless. A task takes None only.
        prompt_field: the field that `{question}` stands for; None finds question, prompt, problem or input.
        target_field: the field of the answer; None if there is none (targets are then empty).
        target_pattern: a regular expression whose group 1, searched in the answer, is the target.
        prompt_template: text with `{question}` or any field of the row in braces.
        chat_template: render the prompt as a user message with the tokenizer's chat template.
        system_prompt: the system message before it.
        chat_options: further arguments of the chat template, such as enable_thinking.
        max_prompt_tokens: the longest prompt accepted, in tokens.
        too_long: "skip" leaves longer prompts out and counts them in `skipped`; "error" raises.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase,
        task: str | None = None,
        difficulty: int | Sequence[int] = 5,
        split: str = "train",
        subset: str | None = None,
        streaming: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        prompt_field: str | None = None,
        target_field: str | None = "answer",
        target_pattern: str | None = None,
        prompt_template: str = "{question}",
        chat_template: bool = False,
        system_prompt: str | None = None,
        chat_options: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        too_long: str = "skip",
    ) -> None:
        if (path is None) == (task is None):
            raise ValueError("a dataset needs either a path or a task")
        if epochs is not None and (epochs < 1 or task is not None):
            raise ValueError(
                f"epochs must be at least 1, got {epochs}" if epochs < 1 else "a task is endless: unset epochs"
            )
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, got {max_prompt_tokens}")
        if too_long not in ("skip", "error"):
            raise ValueError(f"too_long must be 'skip' or 'error', not {too_long!r}")
        self._format = PromptFormat(
            tokenizer,
            prompt_field,
            target_field,
            target_pattern,
            prompt_template,
            chat_template,
            system_prompt,
            chat_options,
        )
        self._limit, self._too_long, self._epochs = max_prompt_tokens, too_long, epochs
        self._name = task or str(path)
        self._source: Source
        if task is not None:
            self._source = TaskRows(task, split=split, seed=seed, difficulty=difficulty)
        elif streaming:
            place = str(path)
            self._source = StreamedRows(
                lambda: open_stream(place, split=split, subset=subset), shuffle=shuffle, seed=seed
            )
        else:
            self._source = StoredRows(open_rows(str(path), split=split, subset=subset), shuffle=shuffle, seed=seed)
        self._identity: dict[str, Any] = {"task": task, "split": split, "seed": seed, "shuffle": shuffle}
        if task is not None:
            self._identity["difficulty"] = difficulty if isinstance(difficulty, int) else list(difficulty)
        if isinstance(self._source, StoredRows):
            self._identity["rows"] = len(self._source.rows)
        self.served = 0
        self.skipped = 0
        self._check()

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._source.epoch

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        while self._epochs is None or self.epoch < self._epochs:
            item = self._source.read()
            if item is None:
                continue
            sample = self._sample(*item, index=self.served)
            if sample is not None:
                self.served += 1
                return sample
            self.skipped += 1
        raise StopIteration

    def held_out(self, n: int) -> list[Sample]:
        """A fixed list for evaluation, whatever has been drawn: the same at every call.

        The first n rows of the split in stored order; of a procedural task n distinct questions of its test split.
        ValueError if there are no n that fit.
        """
        if isinstance(self._source, TaskRows):
            source = self._source
            drawn = tasks.take(n, source.task, seed=source.seed, difficulty=source.difficulty)
            items: Iterator[tuple[int, Row]] = enumerate((row._asdict() for row in drawn), 1)
        else:
            items = self._source.scan()
        found: list[Sample] = []
        for number, row in items:
            if len(found) == n:
                break
            sample = self._sample(number, row, index=len(found))
            if sample is not None:
                found.append(sample)
        if len(found) < n:
            raise ValueError(f"{self._name}: {n} samples asked for, but only {len(found)} prompts are there and fit")
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON."""
        return {
            "identity": self._identity,
            "source": self._source.state(),
            "served": self.served,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was called. ValueError if that was over other data or another order."""
        for name in {**self._identity, **state["identity"]}:
            was, now = state["identity"].get(name), self._identity.get(name)
            if was != now:
                raise ValueError(f"{self._name}: the saved position does not fit: {name} was {was!r} and is {now!r}")
        self._source.load(state["source"])
        self.served, self.skipped = state["served"], state["skipped"]

    def _sample(self, number: int, row: Row, *, index: int) -> Sample | None:
        """The sample of a row, or None if it is too long and to be skipped."""
        try:
            text, target = self._format.render(number, row)
        except ValueError as error:
            raise ValueError(f"{self._name}, {error}") from error
        text, ids = self._format.encode(text)
        if self._limit is None or len(ids) <= self._limit:
            return Sample(Prompt(text, ids, index), target)
        if self._too_long == "error":
            raise ValueError(
                f"{self._name}, row {number}: the prompt has {len(ids)} tokens, max_prompt_tokens is {self._limit}"
            )
        return None

    def _check(self) -> None:
        stored = self._source.rows if isinstance(self._source, StoredRows) else None
        if isinstance(stored, list):
            for number, row in enumerate(stored, 1):
                try:
                    self._format.render(number, row)
                except ValueError as error:
                    raise ValueError(f"{self._name}, {error}") from error
        rows = self._source.scan() if stored is not None else islice(self._source.scan(), _PROBE)
        checked, fits = 0, False
        for number, row in rows:
            checked += 1
            fits |= self._sample(number, row, index=0) is not None
            if fits and (stored is None or self._limit is None or self._too_long == "skip"):
                break
        if not checked:
            raise ValueError(f"{self._name} is empty: it has no rows")
        if not fits:
            raise ValueError(f"{self._name}: all of {checked} prompts are longer than max_prompt_tokens={self._limit}")
