"""One session: the requests of one episode's clients, the turns that answer them, and what became of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any

from forge.engines.interface import extend
from forge.types import Completion

from .dialects import Dialect
from .generation import ABANDONED, CLOSING, WINDOW, Generation, InThread, abandon, cut_turn, make_delta, make_token
from .keys import conversation_keys, tools_key
from .messages import BadRequest, Call, Delta, ModelRequest, ModelTurn
from .policies import Policy, sample_turns
from .reading import OPENING, TextReader, TurnReader, turn_message
from .rendering import extension, prompt
from .sampling import choose_grammar, client_sampling, read_logprobs
from .settings import SessionSettings
from .tree import Place, TokenRun, TokenTree


class Session:
    """The state of one episode.

    Args:
        key: its secret.
        policies: by the name that clients ask for; `known` are all names, for errors.
        in_thread: runs what takes long, templates and tokenizers, beside the event loop.
        commit: is awaited with (policy, runs) before the answer that they belong to is sent.
    """

    def __init__(
        self,
        key: str,
        settings: SessionSettings,
        policies: Mapping[str, Policy],
        in_thread: InThread,
        commit: Callable[[str, Sequence[TokenRun]], Awaitable[None]],
        known: Sequence[str] = (),
    ) -> None:
        self.known, self.forwarded = known or tuple(policies), 0  # open requests of models that others serve
        self.key, self.settings, self.policies = key, settings, policies
        self.in_thread, self.commit = in_thread, commit
        self.trees = {
            name: TokenTree(restores_thoughts=policy.dialogue.thoughts == "keep") for name, policy in policies.items()
        }
        self.delivered: set[str] = set()  # ids of turns
        self.counts: Counter[str] = Counter()
        self.asked: dict[str, set[str]] = defaultdict(set)  # settings of sampling that clients named
        self.ends_at = time.monotonic() + settings.seconds
        self._idle = asyncio.Event()  # whether no answer is being written
        self._idle.set()
        self._readers = 0
        self.limit = ""  # the first limit that an answer met
        self._generations: dict[bytes, list[Generation]] = defaultdict(list)
        self._committing = asyncio.Lock()  # first come first served: turns are written in the order of their numbers
        self._random = random.Random(f"{settings.seed}/{settings.name}")

    @property
    def turns(self) -> int:
        """The number of turns so far."""
        return sum(len(tree.runs) for tree in self.trees.values())

    @property
    def open_generations(self) -> list[Generation]:
        """The generations that are being sampled."""
        return [
            generation
            for generations in self._generations.values()
            for generation in generations
            if generation.task is not None and not generation.task.done()
        ]

    async def settle(self, digest: bytes) -> None:
        """Wait a moment if an equal request has a connection: a client may ask again before its last connection is
        seen to be closed. What still has one then is another request, not a lost one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await asyncio.gather(*(generation.alone.wait() for generation in self._generations[digest]))

    def answer(self, dialect: Dialect, request: ModelRequest, digest: bytes, *, is_retry: bool) -> Generation:
        """Begin the answer to a request, or return the one that its client has lost.

        Args:
            digest: of the request's path and body: equal for a retry.
            is_retry: whether the client says that it asks again.

        Raises:
            BadRequest: too many requests at once.
        """
        self.counts["requests"] += 1
        for generation in reversed(self._generations[digest]):
            is_lost = not generation.readers and not generation.is_delivered
            is_recent = time.monotonic() - generation.began_at < WINDOW
            failed = generation.task is not None and generation.task.done() and not generation.turns
            if (is_lost or is_retry) and is_recent and not failed:
                self.counts["retries"] += 1
                return generation
        self._check_open()
        ids = tuple(dialect.id_prefix + make_token() for _ in range(request.samples))
        generation = Generation(request, ids)
        self._generations[digest].append(generation)
        for name, value in request.overridden.items():
            self.asked[name].add(str(value))
        generation.task = asyncio.create_task(self._generate(generation, dialect))
        # A failure is raised to the connections that wait; without any, the client's retry begins another generation.
        generation.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return generation

    @contextmanager
    def forwarding(self, model: str) -> Iterator[None]:
        """Within the block a request is answered by the provider of its model.

        Raises:
            BadRequest: too many requests at once, or the session's time is over.
        """
        self._check_open()
        if time.monotonic() >= self.ends_at:
            self.limit = self.limit or "seconds"
            raise BadRequest("the time of this session is over", code="session_ended")
        self.counts[f"forwarded/{model}"] += 1
        self.forwarded += 1
        try:
            yield
        finally:
            self.forwarded -= 1

    def _check_open(self) -> None:
        limit = self.settings.max_open
        if len(self.open_generations) + self.forwarded >= limit:
            raise BadRequest(f"this session has {limit} requests open already: wait for their answers", status=429)

    @contextmanager
    def reading(self, generation: Generation) -> Iterator[None]:
        """Within the block a connection waits for an answer, or is sent it."""
        generation.readers += 1
        generation.alone.clear()
        self._readers += 1
        self._idle.clear()
        try:
            yield
        finally:
            generation.readers -= 1
            if not generation.readers:
                generation.alone.set()
                if self.settings.is_served:
                    asyncio.get_running_loop().call_later(ABANDONED, abandon, generation)
            self._readers -= 1
            if not self._readers:
                self._idle.set()

    async def written(self, seconds: float) -> None:
        """Wait until no answer is being written, at most so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    def mark_delivered(self, generation: Generation) -> None:
        """Note that a client has received an answer."""
        generation.is_delivered = True
        self.delivered.update(generation.ids)

    async def close(self) -> None:
        """Cancel what is still sampled: its client has ended."""
        tasks = [generation.task for generation in self.open_generations if generation.task is not None]
        self.counts["cancelled"] += len(tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def restore(self, name: str, run: TokenRun) -> None:
        """Take back a turn of a journal."""
        self.trees[name].add(run)

    def policy_of(self, name: str) -> Policy:
        """The policy of this name. BadRequest: there is none."""
        if name not in self.policies:
            known = ", ".join(self.known)
            message = f"model {name[:60]!r} is not served here: ask for {known}"
            raise BadRequest(message, "model", 404, "model_not_found")
        return self.policies[name]

    def context(self, request: ModelRequest) -> tuple[Place, list[int], tuple[int, ...]]:
        """Where a request belongs, all tokens of its prompt, and those that come after its parent.

        Raises:
            BadRequest: a conversation that the chat template cannot render, or an unknown id.
        """
        policy, tree = self.policy_of(request.model), self.trees[request.model]
        if request.prompt:
            encode = policy.dialogue.tokenizer
            ids = encode(request.prompt)["input_ids"] if isinstance(request.prompt, str) else list(request.prompt)
            return Place(None, request.messages, "start", ""), ids, tuple(ids)
        if policy.chat_error:
            raise BadRequest(f"{policy.chat_error}; /v1/completions takes a text", "messages")
        try:
            place = tree.place(request)
        except KeyError:
            raise BadRequest(
                f"no response {request.previous[:60]!r} in this session: send the whole conversation",
                "previous_response_id",
                404,
                "previous_response_not_found",
            ) from None
        dialogue = policy.dialogue
        if place.parent is not None:
            tokens = tree.tokens(place.parent)
            conversation = [*tree.conversation(place.parent), *place.messages]
            try:
                if not dialogue.rewrites(tokens, prompt(dialogue, conversation), place.parent.tools):
                    context = tuple(extension(dialogue, tokens, place.messages, place.parent.tools))
                    return place, [*tokens, *context], context
            except ValueError as error:
                raise BadRequest(str(error), "messages") from None
            request = replace(request, messages=tuple(conversation), previous="")
            place = Place(None, request.messages, "thoughts_dropped", "", "")
        try:
            ids = dialogue.initial(prompt(dialogue, place.messages), request.tools)
        except ValueError as error:
            raise BadRequest(str(error), "messages") from None
        # A conversation that is cut into other messages may still have the tokens of one that was sampled.
        parent = tree.by_tokens(ids) if place.reason != "start" else None
        if parent is None:
            return place, ids, tuple(ids)
        context = tuple(ids[len(tree.tokens(parent)) :])
        return place._replace(parent=parent, rule="tokens"), ids, context

    async def _generate(self, generation: Generation, dialect: Dialect) -> None:
        request = generation.request
        policy = self.policy_of(request.model)
        place, ids, context = await self.in_thread(lambda: self.context(request))
        generation.prompt_tokens = len(ids)
        room = self._room(len(ids), request)
        if room < 1:
            generation.turns = [ModelTurn(turn, finish="length", prompt_tokens=len(ids)) for turn in generation.ids]
            self.counts["limited"] += 1
            return
        sampling = self._sampling(request, policy, room)
        is_thinking = policy.dialogue.text(ids[-8:], truncated=True).rstrip().endswith(OPENING)
        tools = () if request.tool_choice == "none" else request.tools
        make_reader = TextReader if request.prompt else TurnReader
        readers = [
            make_reader(policy.dialogue, tools, is_thinking=is_thinking, stop=request.stop) for _ in generation.ids
        ]
        turns, surplus = await self._sample(generation, policy, ids, sampling, readers)
        runs = await self.in_thread(
            lambda: [
                self._run(dialect, generation, sample, place, context, turn, readers[sample])
                for sample, turn in enumerate(turns)
            ]
        )
        self.counts[f"surplus/{request.model}"] += surplus
        tree = self.trees[request.model]
        runs = [replace(run, number=len(tree.runs) + sample) for sample, run in enumerate(runs)]
        for run in runs:
            tree.add(run)
        generation.runs = runs
        async with self._committing:
            await self.commit(request.model, runs)
        self._finish(generation, place, readers, len(ids))

    async def _sample(
        self,
        generation: Generation,
        policy: Policy,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        readers: Sequence[TurnReader],
    ) -> tuple[list[Completion], int]:
        """The turns, and the number of tokens that were sampled after a stop string."""
        turns = [Completion() for _ in readers]
        surplus = 0
        streamed = generation.request.stream or bool(generation.request.stop)
        stopped: set[int] = set()
        # One replica has the contexts of an episode; clients of a server are balanced.
        affinity = generation.ids[0] if self.settings.is_served else self.key
        async with aclosing(sample_turns(policy, affinity, ids, sampling, streamed=streamed)) as pieces:
            async for new in pieces:
                for sample, piece in new:
                    if sample in stopped:
                        surplus += len(piece.token_ids)
                        continue
                    turn = turns[sample]
                    turn.experts, turn.sampled_by = piece.experts, piece.sampled_by
                    extend(turn, piece)
                    if (stop := readers[sample].stop_in(turn.token_ids)) is not None:
                        surplus += len(turn.token_ids) - stop[1]
                        cut_turn(turn, stop[1])
                        stopped.add(sample)
                    elif generation.request.stream:
                        news = readers[sample].news(turn.token_ids)
                        generation.tell(*(make_delta(sample, kind, text) for kind, text in news))
                if len(stopped) == len(turns):
                    break
        return turns, surplus

    def _run(
        self,
        dialect: Dialect,
        generation: Generation,
        sample: int,
        place: Place,
        context: tuple[int, ...],
        turn: Completion,
        reader: TurnReader,
    ) -> TokenRun:
        request = generation.request
        text = reader.read(turn.token_ids, truncated=turn.finish == "length")
        call_ids = [dialect.call_prefix + make_token() for _ in text.calls]
        added = (*place.messages, turn_message(text, call_ids))
        parent = place.parent
        tools = request.tools if parent is None else parent.tools
        start = tools_key(tools) if parent is None else parent.key
        # A parent that was found by its tokens has other messages than the client: the key is of the client's.
        if place.rule == "tokens":
            start = tools_key(request.tools)
        return TokenRun(
            number=0,
            parent=None if parent is None else parent.number,
            context=context,
            completion=turn,
            added=added,
            tools=tools,
            key=conversation_keys(start, added)[-1],
            id=generation.ids[sample],
            reason=place.reason,
            rule=place.rule,
            difference=place.difference,
            is_constrained=bool(request.schema is not None or request.tool_choice not in ("auto", "none")),
        )

    def _finish(self, generation: Generation, place: Place, readers: Sequence[TurnReader], prompt_tokens: int) -> None:
        """Complete the answer from its runs."""
        tree = self.trees[generation.request.model]
        cached = 0 if place.parent is None else len(tree.tokens(place.parent))
        tokenizer = self.policies[generation.request.model].dialogue.tokenizer
        turns = []
        for sample, (run, reader) in enumerate(zip(generation.runs, readers, strict=True)):
            message, turn = run.added[-1], run.completion
            calls: list[Call] = message.get("calls", [])
            stop = reader.stop_in(turn.token_ids)
            finish = "length" if turn.finish == "length" else "tool_calls" if calls else "stop"
            turns.append(
                ModelTurn(
                    run.id,
                    message["content"],
                    message.get("thought", ""),
                    tuple(calls),
                    finish,  # type: ignore[arg-type]
                    stop[0] if stop else None,
                    prompt_tokens,
                    cached,
                    len(turn.token_ids),
                    read_logprobs(generation.request, turn, tokenizer),
                    tuple(turn.token_ids),
                )
            )
            text = reader.read(turn.token_ids, truncated=turn.finish == "length")
            generation.deltas += [make_delta(sample, kind, rest) for kind, rest in reader.rest(text)]
            generation.deltas += [Delta(sample, call=call) for call in calls]
        generation.turns = turns
        generation.tell()

    def _room(self, length: int, request: ModelRequest) -> int:
        """The number of tokens that the next turn may have; 0 or less: a limit is reached."""
        settings = self.settings
        room = settings.max_tokens - length
        reached = {
            "max_tokens": room < 1,
            "max_turns": self.turns + len(self.open_generations) > settings.max_turns,
            "seconds": time.monotonic() >= self.ends_at,
        }
        for name, is_reached in reached.items():
            if is_reached:
                self.limit = self.limit or name
                return 0
        limits = [room, settings.max_turn_tokens, request.max_tokens]
        return min(limit for limit in limits if limit is not None)

    def _sampling(self, request: ModelRequest, policy: Policy, room: int) -> dict[str, Any]:
        sampling = {
            **policy.sampling,
            **self.settings.sampling,
            "n": request.samples,
            "max_tokens": room,
            "stop_token_ids": policy.dialogue.stop_ids,
            "seed": self._random.getrandbits(48),
            "top_logprobs": request.logprobs or 0,
        }
        if self.settings.is_served:
            sampling |= client_sampling(request)
        grammar = choose_grammar(request, policy.dialogue.syntax)
        return sampling | ({"grammar": grammar} if grammar else {})
