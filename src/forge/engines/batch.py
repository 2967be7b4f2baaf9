"""The running batch (continuous batching): one token per step for each sequence in the first rows of the cache.

Active rows are always rows 0 to B - 1, so that a decode step works on views. A waiting sample, or else the last row,
replaces a finished row. The state of rows is in tensors, so that a step has the same few operations for any number of
rows and one synchronisation with the device: for the finished rows.

Each token is drawn by inverse transform sampling with its own uniform number: it depends on its row's logits and number
alone, not on the rest of the batch.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..types import TOP_LOGPROBS, UNKNOWN_EXPERT, Completion, Sampling
from .cache import WIDTH, rounded
from .decoder import Decoder
from .interface import Listener
from .prefixes import TOKENS, Prefix, PrefixCache
from .weights import Weights

WORTH_A_STEP = 64  # prompt tokens for which a prompt waits a step: another one that is being computed has them too
MIN_TEMPERATURE = 1e-4  # below it, logits / temperature could overflow float32


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with n samples to draw, each at most `limit` tokens long."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    seed: int
    stops: frozenset[int]
    priority: int = 0
    listener: Listener | None = None
    future: Future[list[Completion]] = field(default_factory=Future)
    admitted: int = 0
    done: dict[int, Completion] = field(default_factory=dict)  # by sample
    prefix: Prefix | None = None  # of the prompt, while samples wait for a row

    @property
    def most(self) -> int:
        """The most positions that a sample can come to."""
        return len(self.prompt) + self.limit


@dataclass(slots=True, eq=False)
class Row:
    """A running or preempted sample.

    `drawn` is its state when it last got a row: the i-th token since then is drawn in step `start + i` and recorded at
    position `context + i`.
    """

    request: Request
    sample: int
    start: int
    drawn: Completion
    prefix: Prefix | None = None  # of all its tokens, between being computed and being placed
    top: list[dict[int, float]] = field(default_factory=list)  # top log-probabilities of every token, if requested

    @property
    def tokens(self) -> list[int]:
        """The prompt and the drawn tokens, which it continues."""
        return [*self.request.prompt, *self.drawn.token_ids]

    @property
    def most(self) -> int:
        """The most positions that it can come to."""
        return self.request.most

    @property
    def context(self) -> int:
        """Number of these in the cache: all but the last."""
        return len(self.request.prompt) + len(self.drawn.token_ids) - 1


class Fresh(NamedTuple):
    """A prompt to compute but for the blocks that are `found`, and its rows."""

    item: Request | Row
    rows: list[int]
    context: list[int]
    found: list[Prefix]

    @property
    def start(self) -> int:
        """Position of the first token that is not in the prefix cache."""
        return TOKENS * len(self.found)


class Batch:
    """Runs requests on a decoder with `rounded(slots, WIDTH)` rows.

    `prefill_tokens` bounds the prompt tokens of one `admit`: a longer prompt is computed in pieces, one a step.
    `prefix_bytes` bounds what is kept of computed prompts for later ones that begin with the same tokens.
    """

    def __init__(self, decoder: Decoder, slots: int, prefill_tokens: int, prefix_bytes: int = 0):
        self.decoder, self.slots, self.prefill_tokens = decoder, slots, prefill_tokens
        self.known = PrefixCache(prefix_bytes)
        self.rows: list[Row] = []
        self.holes: list[int] = []
        self.cut: deque[Row] = deque()  # preempted, to be resumed before waiting requests
        self.steps = self.generated = self.prefilled = self.reused = 0
        self._docked: tuple[Request | Row | None, int] = (None, 0)  # a long prompt in the dock, its tokens there
        self._most = 0  # positions that a running row, or the prompt in the dock, can come to
        # (first step, version, identity) of the weights, in order.
        self._drew = [(0, decoder.weights.version, decoder.weights.identity)]
        device, length, rows = decoder.device, decoder.cache.longest, rounded(slots, WIDTH)
        self.tokens, self.positions, self.ends, self.top_k = (
            torch.zeros(rows, dtype=torch.long, device=device) for _ in range(4)
        )
        self.temperature, self.top_p = (torch.ones(rows, device=device) for _ in range(2))
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stops = torch.full((rows, 1), -1, device=device)
        # By position, like the cache: the uniform numbers, and the tokens drawn with them.
        self.uniform, self.logprobs = (torch.zeros(rows, length, device=device) for _ in range(2))
        self.drawn = torch.zeros(rows, length, dtype=torch.long, device=device)

    @property
    def running(self) -> int:
        """Number of unfinished rows."""
        return len(self.rows) - len(self.holes)

    @property
    def serves(self) -> tuple[int, str]:
        """Version and identity of the weights in use."""
        return self._drew[-1][1:]

    def release(self, waiting: deque[Request]) -> None:
        """Free weights, cache and computed prompts, when nothing runs; `switch` sets new weights."""
        self.rows, self.holes = [], []
        for request in waiting:
            request.prefix = None
        self.known.clear()
        self._docked = (None, 0)
        self.positions.zero_()  # of idle rows, which decode as well: the new cache may be shorter
        self.decoder.release()

    def switch(self, weights: Weights, waiting: deque[Request], cut: bool = False) -> None:
        """Use other weights from the next step on; computed prompts of waiting requests are dropped. With `cut`,
        running rows are preempted to recompute their keys and values."""
        if cut:
            rows = [row for i, row in enumerate(self.rows) if i not in self.holes]
            for i, row in enumerate(self.rows):
                if i not in self.holes:
                    drawn = self._so_far(i)
                    drawn.experts = self._experts(i, drawn)
                    row.drawn = drawn
            self.cut.extendleft(sorted(rows, key=lambda row: row.start, reverse=True))
            self.rows, self.holes = [], []
        for request in waiting:
            request.prefix = None
        self.known.clear()
        self._docked = (None, 0)
        self.decoder.weights = weights
        oldest = min((row.start for row in self.rows), default=self.steps)
        later = [start for start, *_ in self._drew[1:]] + [self.steps]
        kept = [entry for entry, until in zip(self._drew, later, strict=True) if until > oldest]
        self._drew = [*kept, (self.steps, weights.version, weights.identity)]

    def drop(self, request: Request) -> None:
        """Free the rows of a cancelled request."""
        self.holes += [i for i, row in enumerate(self.rows) if row.request is request and i not in self.holes]
        self.cut = deque(row for row in self.cut if row.request is not request)

    def admit(self, waiting: deque[Request]) -> None:
        """Assign free rows to preempted samples, then to `waiting` ones, in order; close the gaps between rows."""
        compacted = self.decoder.cache.limit is not None and bool(self.holes)
        if compacted:
            self._compact()  # the cache may have fewer rows than before
        self._most = max((row.most for row in self.rows), default=0)
        self.holes.sort()
        free = self.holes + list(range(len(self.rows), self.slots))
        placed: dict[int, Row] = {}
        fresh: list[Fresh] = []
        stored: list[tuple[list[int], Prefix]] = []
        coming = set[tuple[int, ...]]()  # beginnings that `fresh` prompts will store; others that share one wait a step
        spent = 0
        while len(placed) < len(free) and (self.cut or waiting):
            item = self.cut[0] if self.cut else waiting[0]
            room = self._room_for(item) - self.running - len(placed)
            if room <= 0:
                break
            self._most = max(self._most, item.most)
            tokens = item.tokens if isinstance(item, Row) else item.prompt
            context, found = list(tokens[:-1]), list[Prefix]()
            if context and item.prefix is None:
                found = self.known.find(context)
                left = len(context) - TOKENS * len(found)
                common = tuple(context[: TOKENS * len(found) + WORTH_A_STEP])
                if common in coming:
                    break  # the next step finds what this one computes
                if left > self.prefill_tokens or self._docked[0] is item:
                    if placed:
                        break
                    spent = self._dock(item, context, found)
                    if item.prefix is None:
                        break
                elif spent + left > self.prefill_tokens:
                    break
                else:
                    spent += left
            rows = free[len(placed) :][:room]
            if isinstance(item, Row):
                item.start, rows = self.steps, rows[:1]
                placed[rows[0]] = item
            else:  # as many of the request's samples as there are free rows
                rows = rows[: item.sampling.n - item.admitted]
                for sample, i in enumerate(rows, item.admitted):
                    placed[i] = Row(item, sample, self.steps, Completion(prompt_ids=item.prompt))
                item.admitted += len(rows)
            if item.prefix is not None:
                stored.append((rows, item.prefix))
            elif context:
                fresh.append(Fresh(item, rows, context, found))
                if left >= WORTH_A_STEP and len(context) * self.decoder.cache.token_bytes <= self.known.limit:
                    coming.add(common)
            if isinstance(item, Row):
                self.cut.popleft()
            elif item.admitted == item.sampling.n:
                waiting.popleft()
        if not placed and not self.holes and not compacted:
            return
        for i, row in placed.items():
            self.rows[i : i + 1] = [row]
        self.holes = self.holes[len(placed) :]
        if placed:
            for rows, prefix in stored:
                self.decoder.cache.fill(rows, [prefix])
            self._prefill(fresh)
            self._set_rows(placed)
        self._compact()
        # Properties of all rows that `step` needs; they change only here.
        self._reach = max((row.context - row.start for row in self.rows), default=0)
        samplings = [row.request.sampling for row in self.rows]
        self._any_greedy = any(s.temperature == 0 for s in samplings)
        # Top-k and top-p have no effect on greedy decoding.
        narrow = [i for i, s in enumerate(samplings) if s.temperature > 0 and (s.top_p < 1 or s.top_k > 0)]
        self._narrow = self._index(narrow) if narrow else None
        self._listening = [i for i, row in enumerate(self.rows) if row.request.listener]
        self._wants_top = [i for i, s in enumerate(samplings) if s.top_logprobs]
        self._top_rows = self._index(self._wants_top) if self._wants_top else None

    def _index(self, rows: list[int]) -> Tensor:
        """Rows as an index on the device, which a list would become in every step."""
        return torch.tensor(rows, device=self.decoder.device)

    def _room_for(self, item: Request | Row) -> int:
        """The number of rows that may run if `item` does: what it and they can come to has room in the cache."""
        cache, most = self.decoder.cache, max(self._most, item.most)
        room = cache.room(max(most, cache.length))
        if room <= self.running and room < cache.room(most):
            cache.resize(cache.reach(most), len(self.rows))  # longer ones have ended
            room = cache.room(cache.length)
        return room

    def _dock(self, item: Request | Row, context: list[int], found: list[Prefix]) -> int:
        """Compute the next piece of a long prompt; returns its length. The last one sets `item.prefix`."""
        cache = self.decoder.cache
        docked, done = self._docked
        if docked is not item:
            done = TOKENS * len(found)
            cache.reserve(done, len(self.rows), self._most)
            cache.fill([cache.dock], found)
            self.reused += done
        piece = context[done : done + self.prefill_tokens]
        cache.reserve(done + len(piece), len(self.rows), self._most)
        self.decoder.prefill([piece], [cache.dock], [done])
        done += len(piece)
        self.prefilled += len(piece)
        self._docked = (item, done)
        if done == len(context):
            item.prefix = tuple(part.clone() for part in cache.read(cache.dock, done))
            self.known.add(context, item.prefix)
            self._docked = (None, 0)
        return len(piece)

    def _prefill(self, fresh: list[Fresh]) -> None:
        if not fresh:
            return
        cache = self.decoder.cache
        cache.reserve(max(len(item.context) for item in fresh), len(self.rows), self._most)
        for each in fresh:
            cache.fill(each.rows[:1], each.found)
            self.reused += each.start
        new = [each for each in fresh if each.start < len(each.context)]
        if new:
            rests, rows = [each.context[each.start :] for each in new], [each.rows[0] for each in new]
            self.decoder.prefill(rests, rows, [each.start for each in new])
            self.prefilled += sum(map(len, rests))
        for item, rows, context, _ in fresh:
            prefix = cache.read(rows[0], len(context))
            cache.fill(rows[1:], [prefix])
            self.known.add(context, prefix)
            if isinstance(item, Request) and item.admitted < item.sampling.n:
                item.prefix = tuple(part.clone() for part in prefix)

    def _set_rows(self, placed: dict[int, Row]) -> None:
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
                self.decoder.cache.fill([hole], [self.decoder.cache.read(last, row.context + self.steps - row.start)])
                for state in (self.tokens, self.positions, self.ends, self.temperature, self.top_k, self.top_p):
                    state[hole] = state[last]
                for state in (self.greedy, self.stops, self.uniform, self.logprobs, self.drawn):
                    state[hole] = state[last]
            else:
                holes.pop()
            self.rows.pop()

    def step(self) -> list[Request]:
        """Draw one token for every row; returns the requests that became complete. Call `admit` before."""
        rows, cache = len(self.rows), self.decoder.cache
        length = min(rounded(self._reach + self.steps + 1, self.decoder.granule), cache.longest)
        cache.reserve(length, rows, self._most)
        # At least two rows: other kernels multiply a single one, and round differently.
        width = rounded(rows, WIDTH) if rows > WIDTH else max(rows, 2)
        logits = self.decoder.decode(self.tokens[:width], self.positions[:width], length)[:rows]
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
        if self._top_rows is not None:
            for i, top in zip(self._wants_top, top_logprobs(logits[self._top_rows]), strict=True):
                self.rows[i].top.append(dict(islice(top.items(), self.rows[i].request.sampling.top_logprobs)))
        complete = []
        for i, ended in enumerate(finished.tolist()):  # `nonzero` would wait for the device once more
            if not ended:
                continue
            row, completion = self.rows[i], self._so_far(i)
            completion.experts = self._experts(i, completion)
            completion.finish = "stop" if completion.token_ids[-1] in row.request.stops else "length"
            row.request.done[row.sample] = completion
            self.holes.append(i)
            if len(row.request.done) == row.request.sampling.n:
                complete.append(row.request)
        if self._listening:
            self._stream(tokens, logprobs)
        return complete

    def _stream(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Pass this step's tokens to the listeners, with one more synchronisation for all of them."""
        _, version, identity = self._drew[-1]
        drawn = torch.stack([tokens.double(), logprobs.double()]).cpu()[:, self._listening].tolist()
        for i, token, logprob in zip(self._listening, *drawn, strict=True):
            request, sample = self.rows[i].request, self.rows[i].sample
            finish = request.done[sample].finish if sample in request.done else ""
            piece = Completion("", [int(token)], [logprob], {}, request.prompt, [version], finish)
            piece.identities[version] = identity
            piece.top_logprobs = self.rows[i].top[-1:]
            if request.listener is None or request.future.done():
                continue
            try:
                request.listener(sample, piece)
            except Exception as error:  # the request fails, not the engine
                if request.future.set_running_or_notify_cancel():
                    request.future.set_exception(error)

    def _experts(self, i: int, completion: Completion) -> np.ndarray | None:
        """The experts of the tokens in row i; of the last layer, which a prompt's tokens skip, as they were before the
        sample was preempted."""
        experts = self.decoder.cache.experts(i, len(completion.prompt_ids) + len(completion.token_ids))
        if experts is not None and (before := self.rows[i].drawn.experts) is not None:
            again = experts[: len(before)]
            np.copyto(again, before, where=again == UNKNOWN_EXPERT)
        return experts

    def _so_far(self, i: int) -> Completion:
        """All tokens of the sample in row i, including those before it was preempted."""
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
            "",
            before.token_ids + self.drawn[i, span].tolist(),
            before.logprobs + self.logprobs[i, span].tolist(),
            {},
            before.prompt_ids,
            versions,
            identities=identities,
            top_logprobs=list(row.top),
        )


def uniforms(seed: int, sample: int, count: int) -> Tensor:
    """The random numbers in [0, 1) of one sample, (count,); a smaller count gives a prefix."""
    key = np.array([seed % 2**64, sample], dtype=np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).random(count, dtype=np.float32))


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits (B, V) with everything outside the top k and then the top-p nucleus at -inf. top_k, top_p: (B,)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(ranks >= limit[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    # A token stays if those before it do not reach top_p; the first always stays, also where top_p is 0 in 32 bits.
    # top_p = 1 keeps all, however the sum is rounded.
    outside = (probs.cumsum(-1) - probs >= top_p[:, None]) & (top_p[:, None] < 1) & (ranks > 0)
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(outside, -torch.inf))


def draw(logits: Tensor, uniform: Tensor, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token a row: logits (B, V) and uniform (B,) -> token ids and log-probabilities under softmax, (B,) each.

    `logits` are after temperature, top-k and top-p. Rows marked in `greedy` (B,) take the most likely token.
    """
    probs = logits.softmax(-1)
    total = probs.cumsum(-1)
    # A rounding step below the total, so that the target always falls on a token with positive probability.
    target = uniform.clamp(max=1 - 2**-22)[:, None] * total[:, -1:]
    tokens = torch.searchsorted(total, target, right=True)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probs.gather(-1, tokens).log_()[:, 0]


def top_logprobs(logits: Tensor) -> list[dict[int, float]]:
    """The most likely tokens of each row of logits (B, V) in descending order, with their log-probabilities, without
    those at -inf.

    Always up to 20 tokens, so that ties do not break differently with the requests of other rows. Synchronises.
    """
    probs, tokens = logits.softmax(-1).topk(min(TOP_LOGPROBS, logits.shape[-1]))
    ids, logprobs = torch.stack([tokens.double(), probs.log_().double()]).tolist()
    return [
        {int(token): logprob for token, logprob in zip(*row, strict=True) if logprob > -torch.inf}
        for row in zip(ids, logprobs, strict=True)
    ]
