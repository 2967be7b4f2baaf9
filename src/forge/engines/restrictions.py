"""What rows of the running batch may not draw, apart from what grammars exclude, and the texts that end an answer.

In order: the repetition penalty, then (after grammars) top-k and top-p.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.tokenizer import has_tokenizer, open_tokenizer
from .requests import RunningSample
from .sampling import keep_top

MAX_BYTES = 4  # of a character in UTF-8; a byte-level token may be only one of them
MAX_SPECIAL = 16  # special tokens among the last ones, which have no text


class Words:
    """Tokenizer of the model for requests with stop texts, opened by the first such request; usable from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> Any:
        if not has_tokenizer(self._folder):
            raise ValueError(
                f"stop texts need the model's tokenizer, but {self._folder} has none: use stop_token_ids, or add the "
                "tokenizer files"
            )
        return open_tokenizer(str(self._folder))

    def open(self) -> None:
        """Open the tokenizer if it is not open yet.

        Raises:
            ValueError: the model's folder has none.
        """
        with self._lock:
            _ = self._tokenizer

    def ended(self, tokens: Sequence[int], stops: Sequence[str]) -> bool:
        """Return whether the last of the given tokens completed one of the texts `stops`; call `open` before."""
        # Only the last tokens are decoded: earlier texts were found when their tokens were the last.
        longest = max(len(stop.encode()) for stop in stops)
        text = self._tokenizer.decode(tokens[-(longest * MAX_BYTES + MAX_SPECIAL) :], skip_special_tokens=True)
        return any(stop in text for stop in stops)


class Restrictions:
    """Sampling restrictions of each row (top-k, top-p, repetition penalty), as tensors (rows,) on the device."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._device = device
        self._shape = (rows, vocab)
        self.top_k = torch.zeros(rows, dtype=torch.long, device=device)
        self.top_p, self.penalty = (torch.ones(rows, device=device) for _ in range(2))

        # (rows, vocab), the tokens in prompt and answer of rows with a penalty; made when the first row has one.
        self._seen: Tensor | None = None

        # Indices of rows, None if there are none: with top-k or top-p, with a penalty, and those that record the
        # log-probabilities before any restriction.
        self.bounded: Tensor | None = None
        self._penalised: Tensor | None = None
        self._policy: Tensor | None = None
        self.watched: dict[int, RunningSample] = {}  # rows with stop texts, whose tokens the host reads
        self._watched_index: Tensor | None = None

    def place(self, index: Tensor, placed: dict[int, RunningSample]) -> None:
        """Set the restrictions of rows with new samples.

        Args:
            index: the rows of `placed` on the device.
            placed: the samples by number of the row.
        """
        samplings = [row.request.sampling for row in placed.values()]

        # Tensors, so that a step has the same operations whatever its rows ask for.
        for state, settings in (
            (self.top_k, [s.top_k for s in samplings]),
            (self.top_p, [s.top_p for s in samplings]),
            (self.penalty, [s.repetition_penalty for s in samplings]),
        ):
            state[index] = torch.tensor(settings, dtype=state.dtype, device=self._device)

        # The table of seen tokens is large, and made only where a row has a penalty.
        for i, row in placed.items():
            if row.request.sampling.repetition_penalty == 1:
                continue
            if self._seen is None:
                self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._seen[i] = False
            self._seen[i, torch.tensor(row.tokens, device=self._device)] = True

    def move(self, free: int, last: int) -> None:
        """Copy the restrictions of row `last` to row `free`."""
        for state in (self.top_k, self.top_p, self.penalty, self._seen):
            if state is not None:
                state[free] = state[last]

    def describe(self, rows: Sequence[RunningSample], make_index: Callable[[list[int]], Tensor | None]) -> None:
        """Record which of the running rows have which restrictions.

        Args:
            make_index: returns numbers of rows as an index on the device, None for no rows.
        """
        # Rows come and go in most steps, and few requests restrict anything.
        restricted = {i: row for i, row in enumerate(rows) if row.request.is_restricted}
        samplings = {i: row.request.sampling for i, row in restricted.items()}

        # Top-k and top-p have no effect on greedy decoding.
        bounded_rows = [i for i, s in samplings.items() if s.temperature > 0 and (s.top_p < 1 or s.top_k > 0)]
        self.bounded = make_index(bounded_rows)
        self._penalised = make_index([i for i, s in samplings.items() if s.repetition_penalty != 1])
        self._policy = make_index([i for i, s in samplings.items() if s.logprobs_of == "policy" and s.restricted])

        self.watched = {i: row for i, row in restricted.items() if row.request.sampling.stop}
        self._watched_index = make_index(list(self.watched))

    def policy(self, logits: Tensor) -> Tensor | None:
        """Return log-probabilities (rows, V) before tokens are excluded, with the formula of `draw_tokens`, for rows
        that record policy log-probabilities; None if no row does."""
        return None if self._policy is None else logits[self._policy].softmax(-1).log_()

    def record(self, logprobs: Tensor, policy: Tensor | None, tokens: Tensor) -> None:
        """Replace the log-probabilities of sampled tokens by `policy` values, in rows that record policy
        log-probabilities.

        Args:
            logprobs, tokens: (B,), of all rows; `logprobs` is changed in place.
            policy: the result of the method `policy` in this step.
        """
        if policy is not None and self._policy is not None:
            logprobs[self._policy] = policy.gather(-1, tokens[self._policy, None])[:, 0]

    def exclude(self, logits: Tensor) -> None:
        """Apply repetition penalties to logits (B, V), in place."""
        index = self._penalised
        if index is not None and self._seen is not None:
            penalty = self.penalty[index, None]
            values = logits[index]
            lowered = torch.where(values > 0, values / penalty, values * penalty)
            logits[index] = torch.where(self._seen[index], lowered, values)

    @property
    def can_be_captured(self) -> bool:
        """Return whether a CUDA graph may capture a step with these rows: the host reads nothing, and the operations
        are the same whichever rows are restricted."""
        return self._penalised is None and self._policy is None and not self.watched

    def bound(self, logits: Tensor) -> None:
        """Apply top-k and top-p to logits (B, V), in place."""
        index = self.bounded
        if index is not None:
            logits[index] = keep_top(logits[index], self.top_k[index], self.top_p[index])

    def follow(self, tokens: Tensor, words: Words) -> set[int]:
        """Record the sampled tokens (B,) of all rows; return the rows that a stop text has ended."""
        if self._penalised is not None and self._seen is not None:
            self._seen[self._penalised, tokens[self._penalised]] = True
        if self._watched_index is None:
            return set()

        # One copy from the device for all rows that have stop texts.
        ended = set()
        for (i, row), token in zip(self.watched.items(), tokens[self._watched_index].tolist(), strict=True):
            row.answer.append(token)
            if row.request.sampling.stop and words.ended(row.answer, row.request.sampling.stop):
                ended.add(i)
        return ended
