"""Requests of the running batch, their samples, and the records of which samples and weights run when."""

import math
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..types import Completion, Sampling, Spans
from .interface import Listener
from .prefixes import TOKENS, Prefix


class Matcher(Protocol):
    """State of one sample in its grammar, which determines the allowed next tokens.

    Every method may raise a ValueError, which fails the request.
    """

    def copy(self) -> "Matcher":
        """Return a matcher in the same state, which advances separately."""

    def fill(self, bits: np.ndarray) -> None:
        """Write the allowed next tokens into `bits`, int32: bit t % 32 of `bits[t // 32]` is 1 if token t is
        allowed."""

    def accept(self, token: int) -> None:
        """Advance the grammar state by a sampled token."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """Request for n samples of a prompt, each at most `limit` tokens long."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    seed: int
    stops: frozenset[int]
    priority: int = 0
    listener: Listener | None = None
    grammar: Matcher | None = None  # in its first state, which each sample copies
    future: Future[list[Completion]] = field(default_factory=Future)
    admitted: int = 0  # samples that got a row
    completions: dict[int, Completion] = field(default_factory=dict)  # by sample
    prefix: Prefix | None = None  # of the prompt, while samples wait for a row
    is_restricted: bool = field(init=False)  # whether a setting bounds what is drawn, or a stop text ends it

    def __post_init__(self) -> None:
        self.is_restricted = self.sampling.restricted or bool(self.sampling.stop)

    def startable(self, version: int) -> int:
        """Return the number of waiting samples of the request that may start with this weight version.

        Samples start in order: with a schedule, those before the first whose first token is another version's.
        """
        if not self.sampling.schedule:
            return self.sampling.n - self.admitted
        first_versions = [spans[0][0] for spans in self.sampling.schedule[self.admitted :]]
        return sum(1 for _ in takewhile(lambda first: first == version, first_versions))

    @property
    def tokens(self) -> list[int]:
        """Return the prompt tokens, which all samples continue."""
        return list(self.prompt)

    @property
    def max_length(self) -> int:
        """Return the largest possible number of tokens of prompt and completion together."""
        return len(self.prompt) + self.limit


@dataclass(slots=True, eq=False)
class RunningSample:
    """Sample that runs, or that was preempted or paused and waits for a row.

    The i-th token since it last got a row, from 0, is drawn in step `start + i` and recorded at position `context + i`.
    """

    request: EngineRequest
    sample: int  # its number in the request
    start: int  # the step in which it last got a row
    resumed: Completion  # its tokens before that step
    prefix: Prefix | None = None  # keys and values of `tokens` but the last, while it waits for a row
    top: list[dict[int, float]] = field(default_factory=list)  # top log-probabilities of every token, if requested
    matcher: Matcher | None = None  # its state in the request's grammar; a preempted sample keeps it
    answer: list[int] = field(default_factory=list)  # all tokens drawn, if the request has stop texts

    @property
    def tokens(self) -> list[int]:
        """Return the tokens that the sample continued when it last got a row: the prompt and the tokens sampled
        before."""
        return [*self.request.prompt, *self.resumed.token_ids]

    @property
    def max_length(self) -> int:
        """Return the largest possible number of tokens of prompt and completion together."""
        return self.request.max_length

    @property
    def spans(self) -> Spans:
        """Return the spans of its request's schedule; () if it has none."""
        return self.request.sampling.schedule[self.sample] if self.request.sampling.schedule else ()

    def next_version(self, drawn: int) -> int:
        """Return the weight version that must sample the token after the first `drawn` tokens, by the sample's
        schedule.

        The last span's weights draw all remaining tokens, whatever its count.
        """
        for version, count in self.spans[:-1]:
            if drawn < count:
                return version
            drawn -= count
        return self.spans[-1][0]

    @property
    def context(self) -> int:
        """Return the number of `tokens` that a prefill writes into the cache: all but the last, which the next step
        processes."""
        return len(self.request.prompt) + len(self.resumed.token_ids) - 1


class Admission(NamedTuple):
    """Next samples to run: one preempted sample, or as many samples of a request as there are free rows."""

    item: EngineRequest | RunningSample
    rows: list[int]  # one for each sample
    context: list[int]  # the item's tokens but the last, which the first decode step takes
    blocks: list[Prefix]  # the blocks of the prefix cache with which the context starts

    @property
    def start(self) -> int:
        """Return the position of the first token that is not in the prefix cache."""
        return TOKENS * len(self.blocks)


class WeightSpan(NamedTuple):
    """Weights in use from decode step `start` until the next span."""

    start: int
    version: int
    identity: str


class WeightHistory:
    """Record of the weights in use at each decode step, starting with the constructor's weights at step 0."""

    def __init__(self, version: int, identity: str) -> None:
        self.spans = [WeightSpan(0, version, identity)]

    @property
    def current(self) -> WeightSpan:
        """Return the weights in use at present."""
        return self.spans[-1]

    def switch(self, weights: WeightSpan, oldest: int) -> None:
        """Use new weights from step `weights.start` on. Spans that ended at step `oldest` or before are dropped."""
        self.spans = [*(span for span, end in self.ended(weights.start) if end > oldest), weights]

    def ended(self, step: int) -> list[tuple[WeightSpan, int]]:
        """Return each span with the step at which it ends (not included), which is `step` for the current one."""
        return list(zip(self.spans, [*(span.start for span in self.spans[1:]), step], strict=True))

    def of_steps(self, start: int, end: int) -> tuple[list[int], dict[int, str]]:
        """Return the weight version of each step from `start` to `end` - 1, and the identity of each version.

        >>> WeightHistory(version=3, identity="a1").of_steps(5, 7)
        ([3, 3], {3: 'a1'})
        """
        counts = [(span, max(0, span_end - max(span.start, start))) for span, span_end in self.ended(end)]
        versions = [span.version for span, count in counts for _ in range(count)]
        return versions, {span.version: span.identity for span, count in counts if count}


def allowed_tokens(rows: Iterable[RunningSample], vocabulary: int) -> Tensor:
    """Return which tokens the grammars of rows allow next, as bits for `forge.engines.sampling.keep_allowed`.

    A row without a grammar may draw every token. The result is in host memory, so that this does not wait for logits
    that the device computes.
    """
    bits_of_rows = []
    for row in rows:
        bits = np.full(-(-vocabulary // 32), -1, dtype=np.int32)  # -1: all bits are 1
        # A request that failed or was cancelled has its rows until the next step.
        if row.matcher is not None and not row.request.future.done():
            try:
                row.matcher.fill(bits)
            except ValueError as error:
                bits[:] = -1
                fail_request(row.request, error)
        bits_of_rows.append(bits)
    return torch.from_numpy(np.stack(bits_of_rows))


def accept_tokens(rows: Iterable[RunningSample], tokens: list[int]) -> None:
    """Advance the grammar states of rows by the rows' sampled tokens."""
    for row, token in zip(rows, tokens, strict=True):
        if row.matcher is not None and not row.request.future.done():
            try:
                row.matcher.accept(token)
            except ValueError as error:
                fail_request(row.request, error)


def stream_tokens(
    rows: Iterable[RunningSample], index: list[int], tokens: Tensor, logprobs: Tensor, weights: WeightSpan
) -> None:
    """Pass the tokens that a step has just drawn to the listeners of rows.

    Args:
        rows: the rows with a listener.
        index: their indices in `tokens` and `logprobs`, which the step drew for all rows with `weights`.
    """
    # As one tensor, so that there is one copy from the device. Float64 is exact for token ids and float32.
    drawn = torch.stack([tokens.double(), logprobs.double()]).cpu()[:, index].tolist()

    for row, token, logprob in zip(rows, *drawn, strict=True):
        request = row.request
        finish = request.completions[row.sample].finish if row.sample in request.completions else ""
        piece = Completion("", [int(token)], [logprob], {}, request.prompt, [weights.version], finish)
        piece.identities[weights.version] = weights.identity
        piece.top_logprobs = row.top[-1:]

        if request.listener is None or request.future.done():
            continue
        if math.isnan(logprob):
            fail_request(request, UnusableWeights(piece))
            continue
        try:
            request.listener(row.sample, piece)
        except Exception as error:  # the request fails, not the engine
            fail_request(request, error)


def take_due(
    paused: list[RunningSample], waiting: Iterable[EngineRequest], version: int
) -> tuple[list[RunningSample], list[RunningSample]]:
    """Return the paused samples that can continue with this weight version, and the samples that stay paused.

    Requests, paused or waiting, that need weights before this version fail: only others could draw their tokens.
    """
    fail_passed_over(waiting, version)
    due_rows, later_rows = [], []
    for row in paused:
        next_version = row.next_version(len(row.resumed.token_ids))
        if next_version < version:
            fail_request(row.request, PassedOver(row.request, next_version, version))
        elif next_version == version:
            due_rows.append(row)
        else:
            later_rows.append(row)
    return due_rows, later_rows


def fail_passed_over(waiting: Iterable[EngineRequest], version: int) -> None:
    """Fail each waiting request whose schedule needs an earlier weight version for the next sample."""
    for request in waiting:
        if request.sampling.schedule:
            next_version = request.sampling.schedule[request.admitted][0][0]
            if next_version < version:
                fail_request(request, PassedOver(request, next_version, version))


class PassedOver(ValueError):
    """Error: a schedule needs a weight version that this engine had before and no longer has."""

    def __init__(self, request: EngineRequest, next_version: int, version: int) -> None:
        super().__init__(
            f"the schedule of the request with seed {request.seed} wants version {next_version} next, and this engine "
            f"serves version {version}: publish no version before the requests of the one before it are there"
        )


class UnusableWeights(RuntimeError):
    """Error: no token can be sampled, because logits are NaN or infinite or the request's restrictions exclude every
    token."""

    def __init__(self, completion: Completion) -> None:
        index = next(i for i, logprob in enumerate(completion.logprobs) if math.isnan(logprob))
        version = completion.versions[index]
        super().__init__(
            f"weights version {version} give logits that are NaN or infinite, or the request's restrictions leave no "
            "token: look for such values in the weights that were loaded or published"
        )


def fail_request(request: EngineRequest, error: Exception) -> None:
    """Fail one request, if it has not failed before; the others continue."""
    if not request.future.done() and request.future.set_running_or_notify_cancel():
        request.future.set_exception(error)
