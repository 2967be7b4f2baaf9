"""Requests of the running batch, their samples, and the records of which samples and weights run when."""

from __future__ import annotations

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
    """The state of one sample in its grammar: which tokens may come next. Each method may raise ValueError, which fails
    the request."""

    def copy(self) -> Matcher:
        """Return a matcher in the same state, which advances separately."""

    def fill(self, bits: np.ndarray) -> None:
        """Write which tokens may come next: bit t % 32 of `bits[t // 32]`, int32, for token t."""

    def accept(self, token: int) -> None:
        """Advance by a drawn token."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A prompt with n samples to draw, each at most `limit` tokens long."""

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
    is_restricted: bool = field(init=False)  # whether a setting bounds what is drawn, or a text ends it

    def __post_init__(self) -> None:
        self.is_restricted = self.sampling.restricted or bool(self.sampling.stop)

    def startable(self, version: int) -> int:
        """Return the number of its waiting samples that weights of this version may start, in their order."""
        waiting = self.sampling.n - self.admitted
        if not self.sampling.schedule:
            return waiting
        spans_of_samples = self.sampling.schedule[self.admitted :]
        return sum(1 for _ in takewhile(lambda spans: spans[0][0] == version, spans_of_samples))

    @property
    def tokens(self) -> list[int]:
        """Return the prompt, which its samples continue."""
        return list(self.prompt)

    @property
    def max_length(self) -> int:
        """Return the maximum number of positions of a sample."""
        return len(self.prompt) + self.limit


@dataclass(slots=True, eq=False)
class RunningSample:
    """A running or preempted sample.

    `resumed` is its completion when it last got a row: the i-th token since then is drawn in step `start + i` and
    recorded at position `context + i`.
    """

    request: EngineRequest
    sample: int
    start: int
    resumed: Completion
    prefix: Prefix | None = None  # of all its tokens, between being computed and being placed
    top: list[dict[int, float]] = field(default_factory=list)  # top log-probabilities of every token, if requested
    matcher: Matcher | None = None  # its state in the request's grammar; a preempted sample keeps it
    answer: list[int] = field(default_factory=list)  # all tokens drawn, where texts may end it

    @property
    def tokens(self) -> list[int]:
        """Return the prompt and the tokens drawn so far, which it continues."""
        return [*self.request.prompt, *self.resumed.token_ids]

    @property
    def max_length(self) -> int:
        """Return the maximum number of positions of the sample."""
        return self.request.max_length

    @property
    def spans(self) -> Spans:
        """Return the spans of its request's schedule; () if it has none."""
        return self.request.sampling.schedule[self.sample] if self.request.sampling.schedule else ()

    def next_version(self, drawn: int) -> int:
        """Return the version that its schedule wants for the token after `drawn` ones: the last draws all that is
        left."""
        for version, count in self.spans[:-1]:
            if drawn < count:
                return version
            drawn -= count
        return self.spans[-1][0]

    @property
    def context(self) -> int:
        """Return number of these tokens in the cache: all but the last."""
        return len(self.request.prompt) + len(self.resumed.token_ids) - 1


class Admission(NamedTuple):
    """The next samples to run: a preempted one, or as many of a request as there are free rows."""

    item: EngineRequest | RunningSample
    rows: list[int]
    context: list[int]  # its tokens but the last, which the first decode step takes
    blocks: list[Prefix]  # of the prefix cache, with which the context starts

    @property
    def start(self) -> int:
        """Return position of the first token that is not in the prefix cache."""
        return TOKENS * len(self.blocks)


class WeightSpan(NamedTuple):
    """The weights that drew tokens from a step on, until the next span."""

    start: int
    version: int
    identity: str


class WeightHistory:
    """The weights that were in use, and in which steps: first these, from step 0 on."""

    def __init__(self, version: int, identity: str) -> None:
        self.spans = [WeightSpan(0, version, identity)]

    @property
    def current(self) -> WeightSpan:
        """Return the weights in use."""
        return self.spans[-1]

    def switch(self, weights: WeightSpan, oldest: int) -> None:
        """Use other weights from their step on. Spans that ended by step `oldest` are forgotten."""
        self.spans = [*(span for span, end in self.ended(weights.start) if end > oldest), weights]

    def ended(self, step: int) -> list[tuple[WeightSpan, int]]:
        """Return each span with the step at which it ends, which is `step` for the current one."""
        ends = [span.start for span in self.spans[1:]] + [step]
        return list(zip(self.spans, ends, strict=True))

    def of_steps(self, start: int, step: int) -> tuple[list[int], dict[int, str]]:
        """Return the version that drew in each step from `start` on, and the identity of each version."""
        counts = [(span, max(0, end - max(span.start, start))) for span, end in self.ended(step)]
        versions = [span.version for span, count in counts for _ in range(count)]
        return versions, {span.version: span.identity for span, count in counts if count}


def allowed_tokens(rows: Iterable[RunningSample], vocabulary: int) -> Tensor:
    """Return the tokens that the grammars of rows allow, as bits for `forge.engines.sampling.keep_allowed`, in host
    memory: a device computes logits meanwhile."""
    lines = []
    for row in rows:
        bits = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
        # A request that failed or was cancelled has its rows until the next step.
        if row.matcher is not None and not row.request.future.done():
            try:
                row.matcher.fill(bits)
            except ValueError as error:
                bits[:] = -1
                fail_request(row.request, error)
        lines.append(bits)
    return torch.from_numpy(np.stack(lines))


def accept_tokens(rows: Iterable[RunningSample], tokens: list[int]) -> None:
    """Advance the grammars of rows by the tokens drawn for them."""
    for row, token in zip(rows, tokens, strict=True):
        if row.matcher is not None and not row.request.future.done():
            try:
                row.matcher.accept(token)
            except ValueError as error:
                fail_request(row.request, error)


def stream_tokens(
    rows: Iterable[RunningSample], index: list[int], tokens: Tensor, logprobs: Tensor, weights: WeightSpan
) -> None:
    """Pass tokens that these weights have just drawn to the listeners of rows, with one synchronisation for all.

    Args:
        index: of the rows in the tokens and log-probabilities of a step.
    """
    # In double both survive: token ids are exact up to 2^53.
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
    """Return paused samples that weights of this version draw from now on, and those that wait on. Requests whose
    weights were passed over fail."""
    fail_passed_over(waiting, version)
    rows = []
    for row in paused:
        next_version = row.next_version(len(row.resumed.token_ids))
        if next_version < version:
            fail_request(row.request, PassedOver(row.request, next_version, version))
        else:
            rows.append(row)
    is_due = [row.next_version(len(row.resumed.token_ids)) == version for row in rows]
    due_rows = [row for row, ready in zip(rows, is_due, strict=True) if ready]
    return due_rows, [row for row, ready in zip(rows, is_due, strict=True) if not ready]


def fail_passed_over(waiting: Iterable[EngineRequest], version: int) -> None:
    """Fail requests whose next sample starts with weights before this version: only others could draw it."""
    for request in waiting:
        if request.sampling.schedule:
            next_version = request.sampling.schedule[request.admitted][0][0]
            if next_version < version:
                fail_request(request, PassedOver(request, next_version, version))


class PassedOver(ValueError):
    """Weights that a schedule names and that this engine no longer has."""

    def __init__(self, request: EngineRequest, next_version: int, version: int) -> None:
        super().__init__(
            f"the schedule of the request with seed {request.seed} wants version {next_version} next, and this engine "
            f"serves version {version}: publish no version before the requests of the one before it are there"
        )


class UnusableWeights(RuntimeError):
    """Weights whose logits are not numbers, or from which the request's restrictions leave no token."""

    def __init__(self, completion: Completion) -> None:
        version = next(
            v for v, logprob in zip(completion.versions, completion.logprobs, strict=True) if math.isnan(logprob)
        )
        super().__init__(
            f"weights version {version} give logits that are NaN or infinite, or the request's restrictions leave no "
            "token: look for such values in the weights that were loaded or published"
        )


def fail_request(request: EngineRequest, error: Exception) -> None:
    """Fail one request, if it has not failed before; the others continue."""
    if not request.future.done() and request.future.set_running_or_notify_cancel():
        request.future.set_exception(error)
