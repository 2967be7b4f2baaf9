"""The running batch: sequences in the first rows of the cache, one token for each of them a step.

Active rows are always rows 0 to B - 1, so that a decode step works on views. A finished row is taken over by a
waiting sample, or else by the last row. Everything a row needs while it runs sits in tensors, so that a step costs
the same few operations whatever the number of rows, and the host waits for the device once: for the finished rows.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import torch

from forge.engines.decoder import Decoder, rounded
from forge.engines.requests import Prefix, Request, Row
from forge.engines.sampling import MIN_TEMPERATURE, draw, keep_top, likeliest, narrows, uniforms
from forge.engines.weights import Weights
from forge.types import Completion

WIDTH = 8  # kernels are prepared for every new number of rows: so there are few, some idle rows being computed as well


class Batch:
    """Runs requests on a decoder that has `rounded(slots, WIDTH)` rows.

    `prefill_tokens` bounds the prompt tokens of one `admit`: a longer prompt is computed in pieces, one a step.
    """

    def __init__(self, decoder: Decoder, slots: int, prefill_tokens: int):
        self.decoder, self.slots, self.prefill_tokens = decoder, slots, prefill_tokens
        self.rows: list[Row] = []
        self.holes: list[int] = []
        self.cut: deque[Row] = deque()  # to be resumed, before anything that waits
        self.steps = self.generated = self.prefilled = 0
        self._docked: tuple[Request | Row | None, int] = (None, 0)  # whose first tokens are in the dock, how many
        # (first step, version, identity) of the weights in use, in order.
        self._drew = [(0, decoder.weights.version, decoder.weights.identity)]
        device, length, rows = decoder.device, decoder.cache.longest, rounded(slots, WIDTH)
        self.tokens, self.positions, self.ends, self.top_k = (
            torch.zeros(rows, dtype=torch.long, device=device) for _ in range(4)
        )
        self.temperature, self.top_p = (torch.ones(rows, device=device) for _ in range(2))
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stops = torch.full((rows, 1), -1, device=device)
        # By position, like the cache: the numbers to draw with, then what was drawn.
        self.uniform, self.logprobs = (torch.zeros(rows, length, device=device) for _ in range(2))
        self.drawn = torch.zeros(rows, length, dtype=torch.long, device=device)

    @property
    def running(self) -> int:
        """Rows that still draw tokens."""
        return len(self.rows) - len(self.holes)

    @property
    def busy(self) -> bool:
        """Whether any sequence has begun and not ended."""
        return self.running > 0 or len(self.cut) > 0

    @property
    def serves(self) -> tuple[int, str]:
        """Version and identity of the newest weights that were taken into use."""
        return self._drew[-1][1:]

    def release(self, waiting: deque[Request]) -> None:
        """Let go of weights and cache, and of prompts that wait. Nothing may be busy; `switch` brings weights back."""
        self.rows, self.holes = [], []
        for request in waiting:
            request.prefix = None
        self._docked = (None, 0)
        self.decoder.release()

    def switch(self, weights: Weights, waiting: deque[Request], cut: bool = False) -> None:
        """Compute with other weights from the next step on; prompts that wait are forgotten, as computed by the old.

        cut: running rows give up their keys and values as well, and are resumed from their tokens.
        """
        if cut:
            rows = [(row, self._so_far(i)) for i, row in enumerate(self.rows) if i not in self.holes]
            for row, drawn in rows:
                row.drawn = drawn
            self.cut.extendleft(row for row, _ in sorted(rows, key=lambda pair: pair[0].start, reverse=True))
            self.rows, self.holes = [], []
        for request in waiting:
            request.prefix = None
        self._docked = (None, 0)
        self.decoder.weights = weights
        oldest = min((row.start for row in self.rows), default=self.steps)
        later = [start for start, *_ in self._drew[1:]] + [self.steps]
        kept = [entry for entry, until in zip(self._drew, later, strict=True) if until > oldest]
        self._drew = [*kept, (self.steps, weights.version, weights.identity)]

    def drop(self, request: Request) -> None:
        """Free the rows of a request that nobody waits for any more."""
        self.holes += [i for i, row in enumerate(self.rows) if row.request is request and i not in self.holes]
        self.cut = deque(row for row in self.cut if row.request is not request)

    def admit(self, waiting: deque[Request]) -> None:
        """Move samples into free rows, cut ones and then the front of `waiting`, in order; close gaps that remain."""
        self.holes.sort()
        free = self.holes + list(range(len(self.rows), self.slots))
        placed: dict[int, Row] = {}
        fresh: list[tuple[Request | Row, list[int]]] = []
        stored: list[tuple[list[int], Prefix]] = []
        spent = 0
        while len(placed) < len(free) and (self.cut or waiting):
            item = self.cut[0] if self.cut else waiting[0]
            context = item.tokens[:-1]
            if context and item.prefix is None:
                if len(context) > self.prefill_tokens:
                    if placed:
                        break
                    spent = self._dock(item, context)
                    if item.prefix is None:
                        break
                elif spent + len(context) > self.prefill_tokens:
                    break
                else:
                    spent += len(context)
            rows = self._place(item, free[len(placed) :], placed)
            if item.prefix is not None:
                stored.append((rows, item.prefix))
            elif context:
                fresh.append((item, rows))
            if isinstance(item, Row):
                self.cut.popleft()
            elif item.admitted == item.sampling.n:
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

    def _place(self, item: Request | Row, free: list[int], placed: dict[int, Row]) -> list[int]:
        """Give free rows to a cut sample, or to as many samples of a request as there are rows for."""
        if isinstance(item, Row):
            item.start, placed[free[0]] = self.steps, item
            return free[:1]
        rows = free[: item.sampling.n - item.admitted]
        for sample, i in enumerate(rows, item.admitted):
            placed[i] = Row(item, sample, self.steps, Completion(item.prompt, [], [], [], ""))
        item.admitted += len(rows)
        return rows

    def _dock(self, item: Request | Row, context: list[int]) -> int:
        """Compute the next piece of a long prompt: its length. `item.prefix` is set when that was the last one."""
        docked, done = self._docked
        done = done if docked is item else 0
        piece = context[done : done + self.prefill_tokens]
        cache = self.decoder.cache
        cache.reserve(done + len(piece), len(self.rows))
        self.decoder.prefill([piece], [cache.dock], done)
        done += len(piece)
        self.prefilled += len(piece)
        self._docked = (item, done)
        if done == len(context):
            keys, values = cache.read(cache.dock, done)
            item.prefix = (keys.clone(), values.clone())
            self._docked = (None, 0)
        return len(piece)

    def _prefill(self, fresh: list[tuple[Request | Row, list[int]]]) -> None:
        if not fresh:
            return
        cache = self.decoder.cache
        prompts = [item.tokens[:-1] for item, _ in fresh]
        cache.reserve(max(map(len, prompts)), len(self.rows))
        self.decoder.prefill(prompts, [rows[0] for _, rows in fresh])
        for (item, rows), prompt in zip(fresh, prompts, strict=True):
            keys, values = cache.read(rows[0], len(prompt))
            cache.fill(rows[1:], (keys, values))
            if isinstance(item, Request) and item.admitted < item.sampling.n:
                item.prefix = (keys.clone(), values.clone())
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
            (self.tokens, [row.tokens[-1] for row in placed.values()]),
            (self.positions, [row.context for row in placed.values()]),
            (self.ends, [len(request.prompt) - 1 + request.limit for request in requests]),
            (self.temperature, [max(s.temperature, MIN_TEMPERATURE) if s.temperature else 1.0 for s in samplings]),
            (self.top_k, [s.top_k for s in samplings]),
            (self.top_p, [s.top_p for s in samplings]),
            (self.greedy, [s.temperature == 0 for s in samplings]),
            (self.stops, stops),
        ):
            state[index] = torch.tensor(values, dtype=state.dtype, device=device)
        for i, row in placed.items():
            first, limit = len(row.request.prompt) - 1, row.request.limit
            self.uniform[i, first : first + limit] = uniforms(row.request.seed, row.sample, limit)
            row.prefix = None
            if row.request.admitted == row.request.sampling.n:
                row.request.prefix = None

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
        self._narrow = torch.tensor(cut, device=self.decoder.device) if cut else None
        self._heard = [i for i, row in enumerate(self.rows) if row.request.listener]
        self._curious = [i for i, row in enumerate(self.rows) if row.request.sampling.top_logprobs]

    def step(self) -> list[Request]:
        """Draw one token for every row; the requests that became complete. Call `admit` before."""
        rows, cache = len(self.rows), self.decoder.cache
        length = rounded(self._reach + self.steps + 1, self.decoder.granule)
        cache.reserve(length, rows)
        # One row alone would be multiplied by other kernels, which round differently.
        width = rounded(rows, WIDTH) if rows > WIDTH else max(rows, 2)
        logits = self.decoder.decode(self.tokens[:width], self.positions[:width], length)[:rows].float()
        positions = self.positions[:rows]
        logits /= self.temperature[:rows, None]
        if self._narrow is not None:
            at = self._narrow
            logits[at] = keep_top(logits[at], self.top_k[at], self.top_p[at])
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
        if self._curious:
            self._note(logits)
        complete = [request for i in finished.nonzero().flatten().tolist() if (request := self._finish(i))]
        if self._heard:
            self._tell(tokens, logprobs)
        return complete

    def _note(self, logits: torch.Tensor) -> None:
        """Keep the likeliest tokens for those who asked. The host waits for the device once more, for all of them."""
        for i, found in zip(self._curious, likeliest(logits[self._curious]), strict=True):
            row = self.rows[i]
            row.top.append(dict(islice(found.items(), row.request.sampling.top_logprobs)))

    def _tell(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Hand what this step drew to those who listen. The host waits for the device once more, for all of them."""
        _, version, identity = self._drew[-1]
        drawn = torch.stack([tokens.double(), logprobs.double()]).cpu()[:, self._heard].tolist()
        for i, token, logprob in zip(self._heard, *drawn, strict=True):
            request, sample = self.rows[i].request, self.rows[i].sample
            finish = request.done[sample].finish if sample in request.done else ""
            piece = Completion(request.prompt, [int(token)], [logprob], [version], finish)
            piece.identities[version] = identity
            piece.top_logprobs = self.rows[i].top[-1:]
            request.tell(sample, piece)

    def _finish(self, i: int) -> Request | None:
        row, completion = self.rows[i], self._so_far(i)
        request = row.request
        completion.finish = "stop" if completion.token_ids[-1] in request.stops else "length"
        request.done[row.sample] = completion
        self.holes.append(i)
        return request if len(request.done) == request.sampling.n else None

    def _so_far(self, i: int) -> Completion:
        """All that the sample in row i has drawn, before it was last cut and since."""
        row = self.rows[i]
        before, span = row.drawn, slice(row.context, row.context + self.steps - row.start)
        versions, identities = list(before.versions), dict(before.identities)
        ends = [start for start, *_ in self._drew[1:]] + [self.steps]
        for (start, version, identity), end in zip(self._drew, ends, strict=True):
            count = end - max(start, row.start)
            if count > 0:
                versions += [version] * count
                identities[version] = identity
        return Completion(
            before.prompt_ids,
            before.token_ids + self.drawn[i, span].tolist(),
            before.logprobs + self.logprobs[i, span].tolist(),
            versions,
            "",
            identities=identities,
            top_logprobs=list(row.top),
        )
