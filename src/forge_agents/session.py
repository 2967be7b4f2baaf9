"""A session: answers the requests of one episode's clients by sampling turns, and records these turns."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from secrets import token_hex
from typing import Any

from forge.engines.interface import extend_completion
from forge.models.tokenizer import encode_prompt
from forge.types import Completion

from .dialects import Dialect
from .messages import BadRequest, Call, Delta, Finish, ModelRequest, ModelTurn
from .policies import (
    Generation,
    Policy,
    choose_grammar,
    client_sampling,
    read_logprobs,
    sample_turns,
)
from .reading import OPENING, TurnReader, render_prompt
from .settings import TOKEN_LENGTH, SessionSettings
from .tree import Place, TokenRun, TokenTree, conversation_key, tools_key


class Session:
    """Session of one episode: answers its requests and records its turns.

    Args:
        key: the session's secret, which clients send as their API key.
        settings: its seed and limits.
        policies: the policies by the names that clients ask for.
        in_thread: runs a slow function, such as a tokenizer's, outside the event loop, one function at a time.
    """

    def __init__(
        self,
        key: str,
        settings: SessionSettings,
        policies: Mapping[str, Policy],
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self.key = key
        self.settings = settings
        self.policies = policies
        self.in_thread = in_thread
        self.trees = {
            name: TokenTree(restores_thoughts=policy.dialogue.thoughts == "keep") for name, policy in policies.items()
        }
        self.delivered: set[str] = set()  # ids of the turns that a client has received
        self.counts: Counter[str] = Counter()  # see `SessionRecord.counts`
        self.ends_at = time.monotonic() + settings.seconds
        self.readers: set[asyncio.Task[Any]] = set()  # connections that wait for an answer, or send it
        self.open_generations: set[Generation] = set()
        self.size = 0  # bytes of memory that the turns take, about
        self.counting = 0  # requests for a count of tokens that are open
        self._thread_turn = asyncio.Lock()
        self._random = random.Random(f"{settings.seed}/{settings.name}")

    @property
    def turns(self) -> int:
        """Return the number of turns that all policies have sampled so far."""
        return sum(len(tree.runs) for tree in self.trees.values())

    def answer(self, dialect: Dialect, request: ModelRequest) -> Generation:
        """Start a task that generates the answer to a request, and return the generation.

        Raises:
            BadRequest: no policy has the model's name, or too many requests are open.
        """
        self.policy_of(request.model)
        self._check_room()
        self.counts["requests"] += 1
        generation = Generation(request, tuple(dialect.id_prefix + token_hex(12) for _ in range(request.samples)))
        generation.task = asyncio.create_task(self._generate_turns(generation, dialect))
        self.open_generations.add(generation)

        def end_generation(task: asyncio.Task[None]) -> None:
            self.open_generations.discard(generation)
            generation.news.put_nowait(None)
            # `pieces` raises a failure to the connection. If that is gone, asyncio would log an exception that nothing
            # has retrieved: so it is retrieved here.
            _ = task.cancelled() or task.exception()

        generation.task.add_done_callback(end_generation)
        return generation

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the number of tokens of a prompt; BadRequest as of `context`, or if too many requests are open."""
        self._check_room()
        self.counting += 1
        try:
            return len((await self._run_in_thread(lambda: self.context(request)))[1])
        finally:
            self.counting -= 1

    def _check_room(self) -> None:
        limit = self.settings.max_open
        if len(self.open_generations) + self.counting >= limit:
            raise BadRequest(
                f"this session has {limit} open requests, the limit of a session: wait for their responses", status=429
            )

    async def _run_in_thread(self, work: Callable[[], Any]) -> Any:
        # One function of a session at a time: the thread then turns to the other sessions.
        async with self._thread_turn:
            return await self.in_thread(work)

    @contextmanager
    def reading(self, generation: Generation) -> Iterator[None]:
        """Count the current task, within the block, as a connection that waits for or sends an answer.

        After the block a server cancels the generation, since its client has the answer or has hung up. An episode's
        generation continues, so that all of its tokens are counted.
        """
        task: Any = asyncio.current_task()
        self.readers.add(task)
        try:
            yield
        finally:
            self.readers.discard(task)
            if self.settings.is_served:
                generation.task.cancel()

    async def close(self) -> None:
        """Cancel the generations that are still running, whose clients have exited, and wait until they have ended."""
        tasks = [generation.task for generation in self.open_generations]
        self.counts["cancelled"] += len(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def policy_of(self, name: str) -> Policy:
        """Return the policy that clients know by a name; BadRequest if there is none."""
        if name in self.policies:
            return self.policies[name]
        names = ", ".join(self.policies)
        raise BadRequest(
            f"model {name[:60]!r} is not served by this gateway: use {names}", "model", 404, "model_not_found"
        )

    def context(self, request: ModelRequest) -> tuple[Place, list[int], tuple[int, ...]]:
        """Return a request's place in the tree, all tokens of its prompt, and those after the turn that it continues.

        If the request continues no turn, the last two are the same tokens.

        Raises:
            BadRequest: the prompt is far longer than the policy takes or cannot be rendered, or the id of the previous
                turn is unknown.
        """
        policy = self.policy_of(request.model)
        dialogue = policy.dialogue
        tree = self.trees[request.model]

        # To tokenise a few megabytes takes seconds, in a thread that all sessions share.
        limit = self.settings.max_prompt or self.settings.max_tokens
        size = len(request.prompt) + sum(len(str(part)) for part in (*request.messages, *request.tools))
        if size > TOKEN_LENGTH * limit:
            raise BadRequest(
                f"the prompt has {size:,} characters, far more than {limit:,} tokens", code="context_length_exceeded"
            )

        if request.prompt:
            given = request.prompt
            ids = encode_prompt(given, dialogue.tokenizer) if isinstance(given, str) else list(given)
            return Place(None, request.messages, "start"), ids, tuple(ids)
        if policy.chat_error:
            raise BadRequest(f"{policy.chat_error}: send text to /v1/completions instead", "messages")

        try:
            place = tree.place(request)
        except KeyError:
            raise BadRequest(
                f"this session has no response {request.previous[:60]!r}: send the whole conversation",
                "previous_response_id",
                404,
                "previous_response_not_found",
            ) from None

        try:
            if place.parent is not None:
                tokens = tree.tokens(place.parent)
                tools = place.parent.tools
                conversation = [*tree.conversation(place.parent), *place.messages]
                if not dialogue.rewrites(tokens, render_prompt(dialogue, conversation), tools):
                    context = tuple(dialogue.extend(tokens, render_prompt(dialogue, place.messages), tools))
                    return place, [*tokens, *context], context

                # The template renders earlier turns differently, such as without thoughts: a branch starts.
                place = Place(None, tuple(conversation), "thoughts_dropped")

            ids = dialogue.initial(render_prompt(dialogue, place.messages), request.tools)
        except ValueError as error:
            raise BadRequest(str(error), "messages") from None

        return place, ids, tuple(ids)

    async def _generate_turns(self, generation: Generation, dialect: Dialect) -> None:
        # Sample the turns that answer a request, add them to the tree, and queue their pieces for the client.
        request = generation.request
        policy = self.policy_of(request.model)
        capacity, ids = 0, []
        try:
            place, ids, context = await self._run_in_thread(lambda: self.context(request))
            capacity = self._tokens_left(len(ids), request)
        except BadRequest as error:
            if self.settings.is_served or error.code != "context_length_exceeded":
                raise
        generation.prompt_tokens = len(ids)

        # At a limit of the session the answer is empty, not an error: agents then end by themselves.
        if capacity < 1:
            generation.turns = [ModelTurn(turn, finish="length", prompt_tokens=len(ids)) for turn in generation.ids]
            self.counts["limited"] += 1
            self.counts["max_tokens" if self._has_turns_left() else "max_turns"] += time.monotonic() < self.ends_at
            return

        # Fields of `forge.types.Sampling`.
        sampling = {
            **policy.sampling,
            **self.settings.sampling,
            "n": request.samples,
            "max_tokens": capacity,
            "stop_token_ids": policy.dialogue.stop_ids,
            "seed": self._random.getrandbits(48),
            "top_logprobs": request.logprobs or 0,
        }
        # In an episode the run decides how turns are sampled, not the agent.
        if self.settings.is_served:
            sampling |= client_sampling(request)
        if grammar := choose_grammar(request, policy.dialogue):
            sampling["grammar"] = grammar
        # Some templates end the prompt with <think>, which is at most 8 tokens with the line breaks after it.
        is_thinking = policy.dialogue.text(ids[-8:], truncated=True).rstrip().endswith(OPENING)
        tools = () if request.tool_choice == "none" else request.tools
        readers = [
            TurnReader(
                policy.dialogue, tools, is_thinking=is_thinking, stop=request.stop, is_plain=bool(request.prompt)
            )
            for _ in generation.ids
        ]
        turns = await self._sample_turns(generation, policy, ids, sampling, readers)
        longest = len(ids) + max(len(turn.token_ids) for turn in turns)
        self.counts["max_tokens"] += longest >= self.settings.max_tokens

        runs = await self._run_in_thread(
            lambda: [
                self._make_run(dialect, generation, sample, place, context, turn, readers[sample])
                for sample, turn in enumerate(turns)
            ]
        )
        # No await between the numbers and `add`: another generation of this session could add its runs there.
        tree = self.trees[request.model]
        runs = [replace(run, number=len(tree.runs) + sample) for sample, run in enumerate(runs)]
        texts = (*place.messages, *(request.tools if place.parent is None else ()))
        self.size += 40 * len(context) + sum(len(str(text)) for text in texts)
        for run in runs:
            tree.add(run)
            self.size += 100 * len(run.completion.token_ids)

        cached = 0 if place.parent is None else len(tree.tokens(place.parent))
        for sample, (run, reader) in enumerate(zip(runs, readers, strict=True)):
            message = run.added[-1]
            for kind, text in reader.remaining_text(message):
                generation.put_text(sample, kind, text)
            for call in message.get("calls", ()):
                generation.news.put_nowait(Delta(sample, call=call))
            generation.turns.append(self._make_turn(request, run, reader, len(ids), cached))

    async def _sample_turns(
        self,
        generation: Generation,
        policy: Policy,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        readers: Sequence[TurnReader],
    ) -> list[Completion]:
        # Return the samples after a prompt of tokens `ids`, cut at stop strings; queue the text of a stream.
        request = generation.request
        turns = [Completion() for _ in readers]
        stopped: set[int] = set()  # samples that a stop string has ended
        surplus = 0  # tokens that were sampled after a stop string

        # An episode's requests all go to the replica that has their context cached; a server's are balanced.
        affinity = generation.ids[0] if self.settings.is_served else self.key
        streamed = request.stream or bool(request.stop)

        async with aclosing(sample_turns(policy, affinity, ids, sampling, streamed=streamed)) as batches:
            async for batch in batches:
                for sample, piece in batch:
                    if sample in stopped:
                        surplus += len(piece.token_ids)
                        continue

                    turn = turns[sample]
                    reader = readers[sample]
                    turn.experts = piece.experts
                    turn.sampled_by = piece.sampled_by
                    extend_completion(turn, piece)
                    if not streamed:
                        continue

                    if (count := reader.grow(turn.token_ids)) is not None:
                        surplus += len(turn.token_ids) - count
                        del (
                            turn.token_ids[count:],
                            turn.logprobs[count:],
                            turn.versions[count:],
                            turn.top_logprobs[count:],
                        )
                        turn.finish = "stop"
                        stopped.add(sample)
                    elif request.stream:
                        for kind, text in reader.news():
                            generation.put_text(sample, kind, text)

                if len(stopped) == len(turns):
                    break

        self.counts[f"surplus/{request.model}"] += surplus
        return turns

    def _make_run(
        self,
        dialect: Dialect,
        generation: Generation,
        sample: int,
        place: Place,
        context: tuple[int, ...],
        turn: Completion,
        reader: TurnReader,
    ) -> TokenRun:
        # Return a sampled turn as a run of the tree, whose number is set when it is added.
        request = generation.request
        parent = place.parent
        message = reader.read(
            turn.token_ids, make_id=lambda: dialect.call_prefix + token_hex(12), truncated=turn.finish == "length"
        )
        added = (*place.messages, message)
        tools = request.tools if parent is None else parent.tools
        start = tools_key(request.tools) if parent is None else parent.key
        return TokenRun(
            number=0,
            parent=None if parent is None else parent.number,
            context=context,
            completion=turn,
            added=added,
            tools=tools,
            key=conversation_key(start, added),
            id=generation.ids[sample],
            reason=place.reason,
            is_constrained=bool(request.schema is not None or request.tool_choice not in ("auto", "none")),
        )

    def _make_turn(
        self, request: ModelRequest, run: TokenRun, reader: TurnReader, prompt_tokens: int, cached: int
    ) -> ModelTurn:
        """Return the client's answer for a turn that `reader` has read; `cached` is the number of cached prompt
        tokens."""
        message = run.added[-1]
        turn = run.completion
        calls: list[Call] = message.get("calls", [])
        finish: Finish = "tool_calls" if calls else "stop"

        return ModelTurn(
            run.id,
            message["content"],
            message.get("thought", ""),
            tuple(calls),
            "length" if turn.finish == "length" else finish,
            reader.stopped,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            completion_tokens=len(turn.token_ids),
            thought_tokens=reader.thought_tokens,
            logprobs=read_logprobs(request, turn, self.policies[request.model].dialogue.tokenizer),
            token_ids=tuple(turn.token_ids),
        )

    def _has_turns_left(self) -> bool:
        # The open generations include the one that asks.
        return self.turns + len(self.open_generations) <= self.settings.max_turns

    def _tokens_left(self, prompt_tokens: int, request: ModelRequest) -> int:
        """Return the largest number of tokens that the next turn may have; 0 or less if a limit of the session is
        reached."""
        settings = self.settings
        if not self._has_turns_left() or time.monotonic() >= self.ends_at:
            return 0
        limits = (settings.max_tokens - prompt_tokens, settings.max_turn_tokens, request.max_tokens)
        return min(limit for limit in limits if limit is not None)
