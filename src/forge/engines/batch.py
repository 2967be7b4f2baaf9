"""The running batch: sequences in the first rows of the cache, one token for each of them a step.

Active rows are always rows 0 to B - 1, so that a decode step works on views. A finished row is taken over by a
waiting sample, or else by the last row. Everything a row needs while it runs sits in tensors, so that a step costs
the same few operations whatever the number of rows, and the host waits for the device once: for the finished rows.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forge.engines.decoder import Decoder
from forge.engines.sampling import MIN_TEMPERATURE, draw, keep_top, narrows, uniforms
from forge.types import Completion, Sampling


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with n samples to draw, each at most `limit` tokens long."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    seed: int
    stops: frozenset[int]
    future: Future[list[Completion]] = field(default_factory=Future)
    admitted: int = 0
    done: dict[int, Completion] = field(default_factory=dict)  # by sample
    prefix: tuple[Tensor, Tensor] | None = None  # the prompt's keys and values, while samples wait for a row


@dataclass(slots=True)
class Row:
    """A running sample. Its i-th token is drawn in step `start + i` and recorded at position `context + i`."""

    request: Request
    sample: int
    start: int
    context: int  # tokens before the last one of the prompt


class Batch:
    """Runs requests on a decoder. `prefill_tokens` bounds the (padded) prompt tokens of one forward pass."""

    def __init__(self, decoder: Decoder, slots: int, prefill_tokens: int, version: int):
        self.decoder, self.slots, self.prefill_tokens = decoder, slots, prefill_tokens
        self.rows: list[Row] = []
        self.holes: list[int] = []
        self.steps = self.generated = self.prefilled = 0
        self._versions = [(0, version)]  # (first step, version), in order
        device, length = decoder.device, decoder.cache.max_seq_len
        self.tokens, self.positions, self.ends, self.top_k = (
            torch.zeros(slots, dtype=torch.long, device=device) for _ in range(4)
        )
        self.temperature, self.top_p = (torch.ones(slots, device=device) for _ in range(2))
        self.greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        self.stops = torch.full((slots, 1), -1, device=device)
        # By position, like the cache: the numbers to draw with, then what was drawn.
        self.uniform, self.logprobs = (torch.zeros(slots, length, device=device) for _ in range(2))
        self.drawn = torch.zeros(slots, length, dtype=torch.long, device=device)

    @property
    def version(self) -> int:
        return self._versions[-1][1]

    def switch(self, version: int, waiting: deque[Request]) -> None:
        """Tokens from the next step on are of `version`. Stored prompts are forgotten: their keys are of older ones."""
        for request in waiting:
            request.prefix = None
        oldest = min((row.start for row in self.rows), default=self.steps)
        later = [start for start, _ in self._versions[1:]] + [self.steps]
        kept = [v for v, until in zip(self._versions, later, strict=True) if until > oldest]
        self._versions = [*kept, (self.steps, version)]

    def drop(self, request: Request) -> None:
        """Free the rows of a request that nobody waits for any more."""
        self.holes += [i for i, row in enumerate(self.rows) if row.request is request and i not in self.holes]

    def admit(self, waiting: deque[Request]) -> None:
        """Move samples from the front of `waiting` into free rows, in order, then close the gaps that remain."""
        self.holes.sort()
        free = self.holes + list(range(len(self.rows), self.slots))
        placed: dict[int, Row] = {}
        fresh: list[tuple[Request, list[int]]] = []
        stored: list[tuple[list[int], tuple[Tensor, Tensor]]] = []
        widest = 0
        while waiting and len(placed) < len(free):
            request = waiting[0]
            context = len(request.prompt) - 1
            if context and request.prefix is None:
                widest = max(widest, context)
                if fresh and widest * (len(fresh) + 1) > self.prefill_tokens:
                    break
            rows = free[len(placed) :][: request.sampling.n - request.admitted]
            for sample, i in enumerate(rows, request.admitted):
                placed[i] = Row(request, sample, self.steps, context)
            request.admitted += len(rows)
            if request.prefix is not None:
                stored.append((rows, request.prefix))
            elif context:
                fresh.append((request, rows))
            if request.admitted == request.sampling.n:
                request.prefix = None
                waiting.popleft()
        if not placed and not self.holes:
            return
        for i, row in placed.items():
            self.rows[i : i + 1] = [row]
        self.holes = self.holes[len(placed) :]
        if placed:
            for rows, prefix in stored:
                self.decoder.cache.fill(rows, prefix)
            self._prefill(fresh)
            self._seat(placed)
        self._compact()
        self._survey()

    def _prefill(self, fresh: list[tuple[Request, list[int]]]) -> None:
        if not fresh:
            return
        cache, budget = self.decoder.cache, self.prefill_tokens
        prompts = [request.prompt[:-1] for request, _ in fresh]
        cache.reserve(max(map(len, prompts)), len(self.rows))
        if len(fresh) == 1:
            for start in range(0, len(prompts[0]), budget):
                self.decoder.prefill([prompts[0][start : start + budget]], fresh[0][1][:1], start)
        else:
            self.decoder.prefill(prompts, [rows[0] for _, rows in fresh])
        for (request, rows), prompt in zip(fresh, prompts, strict=True):
            prefix = cache.read(rows[0], len(prompt))
            cache.fill(rows[1:], prefix)
            if request.admitted < request.sampling.n:
                request.prefix = (prefix[0].clone(), prefix[1].clone())
            self.prefilled += len(prompt)

    def _seat(self, placed: dict[int, Row]) -> None:
        device = self.decoder.device
        requests = [row.request for row in placed.values()]
        samplings = [request.sampling for request in requests]
        width = max(self.stops.shape[1], *(len(request.stops) for request in requests))
        if width > self.stops.shape[1]:
            self.stops = torch.nn.functional.pad(self.stops, (0, width - self.stops.shape[1]), value=-1)
        stops = [[*request.stops, *[-1] * (width - len(request.stops))] for request in requests]
        index = torch.tensor(list(placed), device=device)
        for state, values in (
            (self.tokens, [request.prompt[-1] for request in requests]),
            (self.positions, [row.context for row in placed.values()]),
            (self.ends, [row.context + row.request.limit for row in placed.values()]),
            (self.temperature, [max(s.temperature, MIN_TEMPERATURE) if s.temperature else 1.0 for s in samplings]),
            (self.top_k, [s.top_k for s in samplings]),
            (self.top_p, [s.top_p for s in samplings]),
            (self.greedy, [s.temperature == 0 for s in samplings]),
            (self.stops, stops),
        ):
            state[index] = torch.tensor(values, dtype=state.dtype, device=device)
        for i, row in placed.items():
            limit = row.request.limit
            self.uniform[i, row.context : row.context + limit] = uniforms(row.request.seed, row.sample, limit)

    def _compact(self) -> None:
        holes = self.holes
        while holes:
            last = len(self.rows) - 1
            if holes[-1] != last:
                hole = holes.pop(0)
                row = self.rows[hole] = self.rows[last]
                self.decoder.cache.fill([hole], self.decoder.cache.read(last, row.context + self.steps - row.start))
                for state in (self.tokens, self.positions, self.ends, self.temperature, self.top_k, self.top_p):
                    state[hole] = state[last]
                for state in (self.greedy, self.stops, self.uniform, self.logprobs, self.drawn):
                    state[hole] = state[last]
            else:
                holes.pop()
            self.rows.pop()

    def _survey(self) -> None:
        """What a step needs to know about its rows as a whole, which only changes when the rows do."""
        self._reach = max((row.context - row.start for row in self.rows), default=0)
        self._any_greedy = any(row.request.sampling.temperature == 0 for row in self.rows)
        cut = [i for i, row in enumerate(self.rows) if narrows(row.request.sampling)]
        self._cut = torch.tensor(cut, device=self.decoder.device) if cut else None

    def step(self) -> list[Request]:
        """Draw one token for every row; the requests that became complete. Call `admit` before."""
        rows, cache = len(self.rows), self.decoder.cache
        # Lengths in multiples of 8 keep the attention kernels on aligned shapes.
        length = min(-(-(self._reach + self.steps + 1) // 8) * 8, cache.max_seq_len)
        cache.reserve(length, rows)
        # Kernels are prepared for every new number of rows: so there are few, some idle rows being computed as well.
        width = rows if rows <= 8 else min(-(-rows // 8) * 8, self.slots)
        logits = self.decoder.decode(self.tokens[:width], self.positions[:width], length)[:rows].float()
        positions = self.positions[:rows]
        logits /= self.temperature[:rows, None]
        if self._cut is not None:
            logits[self._cut] = keep_top(logits[self._cut], self.top_k[self._cut], self.top_p[self._cut])
        at = positions[:, None]
        uniform = self.uniform[:rows].gather(1, at)[:, 0]
        tokens, logprobs = draw(logits, uniform, self.greedy[:rows] if self._any_greedy else None)
        self.tokens[:rows] = tokens
        self.drawn[:rows].scatter_(1, at, tokens[:, None])
        self.logprobs[:rows].scatter_(1, at, logprobs[:, None])
        positions += 1
        finished = (self.stops[:rows] == tokens[:, None]).any(1).logical_or_(positions >= self.ends[:rows])
        self.steps += 1
        self.generated += rows
        return [request for i in finished.nonzero().flatten().tolist() if (request := self._finish(i))]

    def _finish(self, i: int) -> Request | None:
        row = self.rows[i]
        request, count = row.request, self.steps - row.start
        span = slice(row.context, row.context + count)
        ids = self.drawn[i, span].tolist()
        ends = [start for start, _ in self._versions[1:]] + [self.steps]
        versions: list[int] = []
        for (start, version), end in zip(self._versions, ends, strict=True):
            versions += [version] * (end - max(start, row.start))
        finish = "stop" if ids[-1] in request.stops else "length"
        request.done[row.sample] = Completion(request.prompt, ids, self.logprobs[i, span].tolist(), versions, finish)
        self.holes.append(i)
        return request if len(request.done) == request.sampling.n else None
