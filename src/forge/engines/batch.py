"""The running batch (continuous batching): one token per step for each sequence in the first rows of the cache.

Active rows are rows 0 to B - 1, so that a decode step works on views. A waiting sample, or else the last row, replaces
a finished row. The state of rows is in tensors (`forge.engines.rows`); once a step the host reads which have ended.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import torch
from torch import Tensor

from ..types import Completion
from .cache import WIDTH, round_up
from .decoder import Decoder
from .graphs import Drawn, StepGraphs
from .prefill import Prefill
from .prefixes import MIN_SHARED_TOKENS, TOKENS, Prefix
from .requests import (
    Admission,
    EngineRequest,
    RunningSample,
    UnusableWeights,
    WeightHistory,
    WeightSpan,
    accept_tokens,
    allowed_tokens,
    fail_request,
    stream_tokens,
    take_due,
)
from .restrictions import Words
from .rows import RowState
from .sampling import keep_allowed, keep_top, top_logprobs
from .weights import Weights


class RunningBatch:
    """Continuous batch of the requests that run on a decoder.

    At most `slots` rows run. `prefill_tokens` bounds the prompt tokens of one `admit`: a longer prompt is computed in
    pieces, one a step. `prefix_bytes` bounds the memory of computed prompts kept for later ones. `words` finds stop
    texts in answers; None: no request has any.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: int,
        prefill_tokens: int,
        prefix_bytes: int = 0,
        words: Words | None = None,
        graphs: StepGraphs | None = None,
    ):
        self.decoder, self.slots = decoder, slots
        self.words, self.graphs = words, graphs
        self.prefill = Prefill(decoder, prefill_tokens, prefix_bytes)
        self.rows: list[RunningSample] = []
        self.free_rows: list[int] = []  # rows among these whose sample has ended
        self.preempted: deque[RunningSample] = deque()  # resume before waiting requests
        self.paused: list[RunningSample] = []  # until the weights come that draw their next token
        self.steps = self.generated = 0
        self._max_length = 0  # maximum positions of a running row, or of the prompt in the prefill row
        self.history = WeightHistory(decoder.weights.version, decoder.weights.identity)
        self.state = RowState(round_up(slots, WIDTH), decoder.cache.longest, decoder.vocab, decoder.device)
        self.restrictions = self.state.restrictions
        self.count = torch.zeros((), dtype=torch.long, device=decoder.device)  # of rows, for a captured step

        # Properties of all rows that `step` needs; `admit` updates them.
        self._max_offset = 0  # of a row's position from the number of steps
        self._constrained: list[int] = []  # rows with a grammar, and as an index
        self._constrained_index: Tensor | None = None
        self._streamed: list[int] = []  # rows with a listener
        self._scheduled: list[int] = []  # rows with a schedule
        self._with_top: list[int] = []  # rows whose request wants top log-probabilities, and as an index
        self._with_top_index: Tensor | None = None

    @property
    def running(self) -> int:
        """Return the number of unfinished rows of the batch."""
        return len(self.rows) - len(self.free_rows)

    def release(self, waiting: deque[EngineRequest]) -> None:
        """Free weights, cache and computed prompts, when nothing runs; `switch` sets new weights."""
        self.rows, self.free_rows = [], []
        self._drop_prefixes(waiting)
        self.state.positions.zero_()  # of idle rows, which decode as well: the new cache may be shorter
        if self.graphs is not None:
            self.graphs.clear()
        self.decoder.release()

    def switch(self, weights: Weights, waiting: deque[EngineRequest], preempt: bool = False) -> None:
        """Use new weights from the next step on. With `preempt`, running rows recompute their keys and values."""
        if preempt:
            running = self._running_rows()
            for i in running:
                self.rows[i].resumed = self._read_completion(i)

            # The ones that started first resume first: `extendleft` reverses their order.
            newest_first = sorted((self.rows[i] for i in running), key=lambda row: row.start, reverse=True)
            self.preempted.extendleft(newest_first)
            self._erase_rows(running)
            self.rows, self.free_rows = [], []
            for row in self.paused:
                row.prefix = None

        self._drop_prefixes(waiting)
        self.decoder.weights = weights
        due_rows, self.paused = take_due(self.paused, waiting, weights.version)
        self.preempted.extend(due_rows)

        # Weights that ended before the oldest row started drew none of the tokens that are still to be reported.
        oldest = min((row.start for row in self.rows), default=self.steps)
        self.history.switch(WeightSpan(self.steps, weights.version, weights.identity), oldest)

    def _drop_prefixes(self, waiting: deque[EngineRequest]) -> None:
        """Drop all cached prompts, because the weights change."""
        for request in waiting:
            request.prefix = None
        self.prefill.clear()

    def is_scheduled(self, waiting: deque[EngineRequest]) -> bool:
        """Return whether requests with a version schedule still need tokens sampled by the current weights."""
        version = self.history.current.version
        can_start = any(request.startable(version) for request in waiting if request.sampling.schedule)
        rows = (*map(self.rows.__getitem__, self._running_rows()), *self.preempted)
        return can_start or any(row.spans for row in rows)

    def _erase_rows(self, rows: list[int]) -> None:
        """Zero the keys and values of rows, but keep the prompt that is being computed in the prefill row."""
        for row in rows:
            self.decoder.cache.erase(row, self.prefill.length if row == self.decoder.cache.prefill_row else 0)

    def _running_rows(self) -> list[int]:
        return [i for i in range(len(self.rows)) if i not in self.free_rows]

    def drop(self, request: EngineRequest) -> None:
        """Free the rows of a request that was cancelled or has failed."""
        dropped = [i for i in self._running_rows() if self.rows[i].request is request]
        self._erase_rows(dropped)
        self.free_rows += dropped
        self.preempted = deque(row for row in self.preempted if row.request is not request)
        self.paused = [row for row in self.paused if row.request is not request]

    def admit(self, waiting: deque[EngineRequest]) -> None:
        """Assign free rows to preempted samples, then to `waiting` ones, in order; close the gaps between rows."""
        self.free_rows.sort()
        is_compacted = self.decoder.cache.limit is not None and bool(self.free_rows)
        if is_compacted:
            self._compact_rows()  # the cache may have fewer rows than before

        # A long prompt has its piece first; then samples get rows, as the plan says.
        self._max_length = max((row.max_length for row in self.rows), default=0)
        usable_rows = self.free_rows + list(range(len(self.rows), self.slots))
        startable = (request for request in waiting if request.startable(self.history.current.version))
        queue: Iterator[EngineRequest | RunningSample] = chain(self.preempted, startable)
        spent_tokens = 0
        if usable_rows and (first := next(queue, None)):
            spent_tokens = self._prefill_long(first)
            queue = chain([first], queue)
        if admissions := self._plan_admissions(queue, usable_rows, spent_tokens):
            self._place_admissions(admissions, waiting)
        if admissions or self.free_rows or is_compacted:
            self._compact_rows()
            self._describe_rows()

    def _prefill_long(self, item: EngineRequest | RunningSample) -> int:
        """Compute a piece of the queue's first prompt if that is too long for one step; return the piece's length."""
        cache = self.decoder.cache
        length = max(self._max_length, item.max_length)
        if self._row_capacity(length) <= self.running and self._row_capacity(length) < cache.capacity(length):
            # Longer sequences have ended: with fewer positions a row the cache has more rows.
            cache.resize(cache.padded_length(length), len(self.rows))
            self.state.positions[len(self.rows) :] = 0  # of idle rows, which decode as well
        if self._row_capacity(length) <= self.running:
            return 0
        self._max_length = length
        context = item.tokens[:-1]
        if not context or item.prefix is not None:
            return 0
        blocks = self.prefill.cache.find(context)
        if len(context) - TOKENS * len(blocks) <= self.prefill.max_tokens and self.prefill.item is not item:
            return 0
        return self.prefill.compute_piece(item, context, blocks, len(self.rows), length)

    def _plan_admissions(
        self, queue: Iterable[EngineRequest | RunningSample], free: list[int], spent_tokens: int
    ) -> list[Admission]:
        """Assign `free` rows to samples of the queue, up to the first sample that must wait, and return the
        assignments. This step has computed `spent_tokens` of prompts already."""
        admissions: list[Admission] = []
        pending = set[tuple[int, ...]]()  # beginnings that admitted prompts will store; others that share one wait
        used = 0  # of the free rows
        longest = self._max_length

        for item in queue:
            longest = max(longest, item.max_length)
            available = min(self._row_capacity(longest) - self.running, len(free)) - used
            if available <= 0:
                break

            context = item.tokens[:-1]
            blocks = list[Prefix]()
            if context and item.prefix is None:
                blocks = self.prefill.cache.find(context)
                missing = len(context) - TOKENS * len(blocks)
                beginning = tuple(context[: TOKENS * len(blocks) + MIN_SHARED_TOKENS])
                # The next step finds in the cache what this one computes. A long prompt runs once the prefill row has
                # all of it; others, as long as this step has time.
                must_wait = beginning in pending or self.prefill.item is item
                if must_wait or spent_tokens + missing > self.prefill.max_tokens:
                    break

                spent_tokens += missing
                is_stored = len(context) * self.decoder.cache.token_bytes <= self.prefill.cache.limit
                if missing >= MIN_SHARED_TOKENS and is_stored:
                    pending.add(beginning)
            samples = 1 if isinstance(item, RunningSample) else item.startable(self.history.current.version)
            rows = free[used:][: min(available, samples)]
            admissions.append(Admission(item, rows, context, blocks))
            used += len(rows)
        return admissions

    def _place_admissions(self, admissions: list[Admission], waiting: deque[EngineRequest]) -> None:
        """Move the admitted samples from their queues into their rows."""
        placed: dict[int, RunningSample] = {}
        for item, rows, *_ in admissions:
            self._max_length = max(self._max_length, item.max_length)
            # A preempted sample continues; a request starts as many samples as it got rows.
            if isinstance(item, RunningSample):
                item.start = self.steps
                placed[rows[0]] = item
                self.preempted.popleft()
            else:
                for sample, row_index in enumerate(rows, item.admitted):
                    placed[row_index] = RunningSample(item, sample, self.steps, Completion(prompt_ids=item.prompt))
                    placed[row_index].matcher = item.grammar.copy() if item.grammar else None
                item.admitted += len(rows)
                if item.admitted == item.sampling.n:
                    waiting.remove(item)  # the first, but for those that wait for other weights
        for row_index, row in placed.items():
            self.rows[row_index : row_index + 1] = [row]  # replaces row i, or appends it
        self.free_rows = self.free_rows[len(placed) :]

        for admission in admissions:
            if admission.item.prefix is not None:
                self.decoder.cache.fill(admission.rows, [admission.item.prefix])
        missing = [admission for admission in admissions if admission.context and admission.item.prefix is None]
        self.prefill.compute(missing, len(self.rows), self._max_length)
        self.state.place(placed)

        # Their rows of the cache have the keys and values; a prompt's are dropped with its last sample.
        for row in placed.values():
            row.prefix = None
            if row.request.admitted == row.request.sampling.n:
                row.request.prefix = None

    def _describe_rows(self) -> None:
        """Update the summary of all rows that `step` reads."""
        self._max_offset = max((row.context - row.start for row in self.rows), default=0)
        samplings = [row.request.sampling for row in self.rows]
        self.state.any_greedy = any(s.temperature == 0 for s in samplings)
        self.restrictions.describe(self.rows, self._make_index)
        self._constrained = [i for i, row in enumerate(self.rows) if row.matcher]
        self._constrained_index = self._make_index(self._constrained)
        self._streamed = [i for i, row in enumerate(self.rows) if row.request.listener]
        self._scheduled = [i for i, row in enumerate(self.rows) if row.spans]
        self._with_top = [i for i, s in enumerate(samplings) if s.top_logprobs]
        self._with_top_index = self._make_index(self._with_top)

    def _make_index(self, rows: list[int]) -> Tensor | None:
        """Return rows as an index tensor on the device, None for no rows; a list would be copied in every step."""
        return torch.tensor(rows, device=self.decoder.device) if rows else None

    def _row_capacity(self, length: int) -> int:
        """Return the number of rows that fit into the cache if one row grows to `length` positions."""
        return self.decoder.cache.capacity(max(length, self.decoder.cache.length))

    def _compact_rows(self) -> None:
        """Move the last rows into the free ones, so that all rows in use are the first ones. `free_rows` is sorted."""
        while self.free_rows:
            last = len(self.rows) - 1
            if self.free_rows[-1] == last:
                self.free_rows.pop()
            else:
                free_row = self.free_rows.pop(0)
                row = self.rows[free_row] = self.rows[last]
                length = row.context + self.steps - row.start
                self.decoder.cache.fill([free_row], [self.decoder.cache.read(last, length)])
                self.state.move(free_row, last)
            self.rows.pop()

    def step(self) -> list[EngineRequest]:
        """Sample one token for every row, after a call of `admit`; return the requests that became complete."""
        drawn, ended_by_text = self._draw_tokens()
        complete = []
        for i, end in enumerate(drawn.ended_at.tolist()):  # `nonzero` would wait for the device once more
            if end < 0 and i not in ended_by_text:
                continue
            row = self.rows[i]
            completion = self._read_completion(i)
            self.free_rows.append(i)
            if math.isnan(sum(completion.logprobs)):
                fail_request(row.request, UnusableWeights(completion))
                self._erase_rows([i, self.decoder.cache.prefill_row])
                continue

            is_stopped = i in ended_by_text or completion.token_ids[-1] in row.request.stops
            completion.finish = "stop" if is_stopped else "length"
            row.request.completions[row.sample] = completion
            if len(row.request.completions) == row.request.sampling.n:
                complete.append(row.request)

        self.generated += len(self.rows)
        if self._streamed:
            streamed = [self.rows[i] for i in self._streamed]
            stream_tokens(streamed, self._streamed, drawn.tokens, drawn.logprobs, self.history.current)
        if self._scheduled:
            self._pause_scheduled()
        return complete

    def _draw_tokens(self) -> tuple[Drawn, set[int]]:
        """Sample one token for every row; return the tokens, and the rows that a stop text has ended."""
        rows = len(self.rows)
        state = self.state
        length = round_up(self._max_offset + self.steps + 1, self.decoder.granule)
        length = min(length, self.decoder.cache.longest)
        self.decoder.cache.reserve(length, rows, self._max_length)

        # At least two rows: other kernels multiply a single one, and round differently.
        width = round_up(rows, WIDTH) if rows > WIDTH else max(rows, 2)
        self.steps += 1
        is_plain = self._constrained_index is None and self._with_top_index is None
        if self.graphs is not None and is_plain and self.restrictions.can_be_captured:
            drawn = self._draw_captured(self.graphs, rows, width, length)
            return Drawn(*(result[:rows] for result in drawn)), set()

        logits = self.decoder.decode(state.tokens[:width], state.positions[:width], length)[:rows]
        logits /= state.temperature[:rows, None]
        policy = self.restrictions.policy(logits)
        self.restrictions.exclude(logits)
        index = self._constrained_index
        constrained_rows = [self.rows[i] for i in self._constrained]
        if index is not None:
            bits = allowed_tokens(constrained_rows, logits.shape[-1])
            logits[index] = keep_allowed(logits[index], bits.to(logits.device))
        self.restrictions.bound(logits)
        drawn = state.draw(logits, policy=policy)

        if self._with_top_index is not None:
            for i, top in zip(self._with_top, top_logprobs(logits[self._with_top_index]), strict=True):
                self.rows[i].top.append(dict(islice(top.items(), self.rows[i].request.sampling.top_logprobs)))
        if index is not None:
            accept_tokens(constrained_rows, drawn.tokens[index].tolist())
        return drawn, self.restrictions.follow(drawn.tokens, self.words) if self.words else set()

    def _pause_scheduled(self) -> None:
        """Pause rows whose next token is scheduled for later weights; copies of keys and values are kept."""
        for i in {*self._scheduled}.difference(self.free_rows):
            row = self.rows[i]
            token_count = len(row.resumed.token_ids) + self.steps - row.start
            if row.next_version(token_count) > self.history.current.version:
                row.resumed = self._read_completion(i)
                row.prefix = tuple(part.clone() for part in self.decoder.cache.read(i, row.context))
                self.paused.append(row)
                self.free_rows.append(i)

    def _draw_captured(self, graphs: StepGraphs, rows: int, width: int, length: int) -> Drawn:
        """Sample with a graph captured for `width` rows, of which the first `rows` (different in each run) advance."""
        restricted = self.restrictions.bounded is not None

        def draw_step() -> Drawn:
            logits = self.decoder.decode(self.state.tokens[:width], self.state.positions[:width], length)
            logits /= self.state.temperature[:width, None]
            if restricted:
                logits = keep_top(logits, self.restrictions.top_k[:width], self.restrictions.top_p[:width])
            return self.state.draw(logits, self.decoder.row_ids[:width] < self.count)

        self.count.fill_(rows)
        inputs = (self.decoder.weights, self.decoder.cache.keys, self.decoder.cache.values, self.state.stops)
        return graphs.run((width, length, restricted, self.state.any_greedy), inputs, draw_step)

    def _read_completion(self, i: int) -> Completion:
        """Return all tokens of the sample in row i until now, including those before it was preempted."""
        row = self.rows[i]
        resumed = row.resumed
        new_positions = slice(row.context, row.context + self.steps - row.start)  # one token a step
        token_ids = resumed.token_ids + self.state.drawn[i, new_positions].tolist()
        logprobs = resumed.logprobs + self.state.logprobs[i, new_positions].tolist()
        new_versions, identities = self.history.of_steps(row.start, self.steps)

        completion = Completion("", token_ids, logprobs, {}, resumed.prompt_ids, [*resumed.versions, *new_versions])
        completion.identities = resumed.identities | identities
        completion.top_logprobs = list(row.top)
        length = len(resumed.prompt_ids) + len(token_ids)
        completion.experts = self.decoder.cache.experts(i, length, resumed.experts)
        return completion
