"""One session: the requests of one episode's clients, the turns that answer them, and what became of each."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from forge.engines.interface import extend_completion
from forge.types import Completion

from .dialects import Dialect
from .messages import BadRequest, Call, Delta, Finish, ModelRequest, ModelTurn
from .policies import Policy, choose_grammar, client_sampling, read_logprobs, sample_turns
from .reading import OPENING, TurnReader, render_prompt
from .settings import SessionSettings
from .tree import Place, TokenRun, TokenTree, conversation_keys, tools_key

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(eq=False)
class Generation:
    """The answer to one request. `news` has its pieces, and None once its task has ended."""

    request: ModelRequest
    ids: tuple[str, ...]
    turns: list[ModelTurn] = field(default_factory=list)
    prompt_tokens: int = 0
    news: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    def tell(self, sample: int, kind: str, text: str) -> None:
        """Pass on a piece of a sample's thought or content."""
        self.news.put_nowait(Delta(sample, thought=text) if kind == "thought" else Delta(sample, content=text))

    async def pieces(self, patience: float) -> AsyncIterator[Delta | None]:
        """Yield the pieces of the answer; None after each `patience` seconds without one.

        Raises:
            what ended the generation.
        """
        assert self.task is not None
        while True:
            try:
                piece = await asyncio.wait_for(self.news.get(), patience)
            except TimeoutError:
                yield None
                continue
            if piece is None:
                break
            yield piece
        self.task.result()


def cut_turn(turn: Completion, count: int) -> None:
    """Keep the first tokens of a turn, which a stop string ends."""
    del turn.token_ids[count:], turn.logprobs[count:], turn.versions[count:], turn.top_logprobs[count:]
    turn.finish = "stop"


def make_token() -> str:
    """Return random letters for an id."""
    # Not of the seed: an id must not recur in another session.
    return f"{random.SystemRandom().getrandbits(96):024x}"


class Session:
    """The state of one episode.

    Args:
        key: its secret.
        policies: by the name that clients ask for.
        in_thread: runs what takes long, templates and tokenizers, alongside the event loop, one after the other.
    """

    def __init__(
        self,
        key: str,
        settings: SessionSettings,
        policies: Mapping[str, Policy],
        in_thread: InThread,
    ) -> None:
        self.key = key
        self.settings = settings
        self.policies = policies
        self.in_thread = in_thread
        self.trees = {
            name: TokenTree(restores_thoughts=policy.dialogue.thoughts == "keep") for name, policy in policies.items()
        }
        self.delivered: set[str] = set()  # ids of turns
        self.counts: Counter[str] = Counter()
        self.ends_at = time.monotonic() + settings.seconds
        self.readers: set[asyncio.Task[Any]] = set()  # that wait for an answer, or send it
        self.open_generations: set[Generation] = set()
        self._random = random.Random(f"{settings.seed}/{settings.name}")

    @property
    def turns(self) -> int:
        """Return the number of turns so far."""
        return sum(len(tree.runs) for tree in self.trees.values())

    def answer(self, dialect: Dialect, request: ModelRequest) -> Generation:
        """Start the answer to a request.

        Raises:
            BadRequest: another model, or too many requests at once.
        """
        self.policy_of(request.model)
        limit = self.settings.max_open
        if len(self.open_generations) >= limit:
            raise BadRequest(f"this session has {limit} requests open already: wait for their answers", status=429)
        self.counts["requests"] += 1
        generation = Generation(request, tuple(dialect.id_prefix + make_token() for _ in range(request.samples)))
        generation.task = asyncio.create_task(self._generate_turns(generation, dialect))
        self.open_generations.add(generation)

        def end_generation(task: asyncio.Task[None]) -> None:
            self.open_generations.discard(generation)
            generation.news.put_nowait(None)
            # A failure is raised to the connection, which may be gone.
            _ = task.cancelled() or task.exception()

        generation.task.add_done_callback(end_generation)
        return generation

    @contextmanager
    def reading(self, generation: Generation) -> Iterator[None]:
        """Within the block a connection waits for an answer, or is sent it. Of a server's client that hangs up the
        answer is cancelled; an episode's is completed, and counted."""
        task = asyncio.current_task()
        assert task is not None
        assert generation.task is not None
        self.readers.add(task)
        try:
            yield
        finally:
            self.readers.discard(task)
            if self.settings.is_served:
                generation.task.cancel()

    def mark_delivered(self, generation: Generation) -> None:
        """Note that a client has received an answer."""
        self.delivered.update(generation.ids)

    async def close(self) -> None:
        """Cancel the turns that are still sampled: their client has exited."""
        tasks = [generation.task for generation in self.open_generations if generation.task is not None]
        self.counts["cancelled"] += len(tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def policy_of(self, name: str) -> Policy:
        """Return the policy of this name. BadRequest: no policy has it."""
        if name not in self.policies:
            message = f"model {name[:60]!r} is not served here: ask for {', '.join(self.policies)}"
            raise BadRequest(message, "model", 404, "model_not_found")
        return self.policies[name]

    def context(self, request: ModelRequest) -> tuple[Place, list[int], tuple[int, ...]]:
        """Return where a request belongs, all tokens of its prompt, and those that come after its parent.

        Raises:
            BadRequest: a conversation that the chat template cannot render, or an unknown id.
        """
        policy = self.policy_of(request.model)
        dialogue = policy.dialogue
        tree = self.trees[request.model]

        if request.prompt:
            if isinstance(request.prompt, str):
                ids = dialogue.tokenizer(request.prompt)["input_ids"]
            else:
                ids = list(request.prompt)
            return Place(None, request.messages, "start"), ids, tuple(ids)
        if policy.chat_error:
            raise BadRequest(f"{policy.chat_error}; /v1/completions takes a text", "messages")

        try:
            place = tree.place(request)
        except KeyError:
            message = f"no response {request.previous[:60]!r} in this session: send the whole conversation"
            raise BadRequest(message, "previous_response_id", 404, "previous_response_not_found") from None

        try:
            if place.parent is not None:
                tokens = tree.tokens(place.parent)
                tools = place.parent.tools
                conversation = [*tree.conversation(place.parent), *place.messages]
                if not dialogue.rewrites(tokens, render_prompt(dialogue, conversation), tools):
                    context = tuple(dialogue.extend(tokens, render_prompt(dialogue, place.messages), tools))
                    return place, [*tokens, *context], context

                # The template renders the turns before it in other tokens than were sampled: a branch starts.
                place = Place(None, tuple(conversation), "thoughts_dropped")

            ids = dialogue.initial(render_prompt(dialogue, place.messages), request.tools)
        except ValueError as error:
            raise BadRequest(str(error), "messages") from None

        return place, ids, tuple(ids)

    async def _generate_turns(self, generation: Generation, dialect: Dialect) -> None:
        request = generation.request
        policy = self.policy_of(request.model)
        place, ids, context = await self.in_thread(lambda: self.context(request))
        generation.prompt_tokens = len(ids)

        # Beyond a limit of the session the answer is empty.
        capacity = self._tokens_left(len(ids), request)
        if capacity < 1:
            generation.turns = [ModelTurn(turn, finish="length", prompt_tokens=len(ids)) for turn in generation.ids]
            self.counts["limited"] += 1
            return

        sampling = self._sampling_settings(request, policy, capacity)
        is_thinking = policy.dialogue.text(ids[-8:], truncated=True).rstrip().endswith(OPENING)
        tools = () if request.tool_choice == "none" else request.tools
        readers = [
            TurnReader(
                policy.dialogue, tools, is_thinking=is_thinking, stop=request.stop, is_plain=bool(request.prompt)
            )
            for _ in generation.ids
        ]
        turns = await self._sample_turns(generation, policy, ids, sampling, readers)

        runs = await self.in_thread(
            lambda: [
                self._make_run(dialect, generation, sample, place, context, turn, readers[sample])
                for sample, turn in enumerate(turns)
            ]
        )
        # Numbered without an await: another generation may add its runs meanwhile.
        tree = self.trees[request.model]
        runs = [replace(run, number=len(tree.runs) + sample) for sample, run in enumerate(runs)]
        for run in runs:
            tree.add(run)

        cached = 0 if place.parent is None else len(tree.tokens(place.parent))
        for sample, (run, reader) in enumerate(zip(runs, readers, strict=True)):
            for kind, text in reader.rest(run.added[-1]):
                generation.tell(sample, kind, text)
            for call in run.added[-1].get("calls", ()):
                generation.news.put_nowait(Delta(sample, call=call))
            generation.turns.append(self._make_turn(request, run, reader.stopped, len(ids), cached))

    async def _sample_turns(
        self,
        generation: Generation,
        policy: Policy,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        readers: Sequence[TurnReader],
    ) -> list[Completion]:
        request = generation.request
        turns = [Completion() for _ in readers]
        stopped: set[int] = set()  # samples that a stop string has ended
        surplus = 0  # tokens that were sampled after a stop string

        # One replica has the contexts of an episode; clients of a server are balanced.
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

                    count = reader.grow(turn.token_ids)
                    if count is not None:
                        surplus += len(turn.token_ids) - count
                        cut_turn(turn, count)
                        stopped.add(sample)
                    elif request.stream:
                        for kind, text in reader.news():
                            generation.tell(sample, kind, text)

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
        request = generation.request
        is_cut = turn.finish == "length"
        message = reader.read(turn.token_ids, lambda: dialect.call_prefix + make_token(), truncated=is_cut)
        added = (*place.messages, message)
        parent = place.parent
        tools = request.tools if parent is None else parent.tools
        start = tools_key(request.tools) if parent is None else parent.key
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
            is_constrained=bool(request.schema is not None or request.tool_choice not in ("auto", "none")),
        )

    def _make_turn(
        self, request: ModelRequest, run: TokenRun, stop: str | None, prompt_tokens: int, cached: int
    ) -> ModelTurn:
        """Return the answer of a run."""
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
            stop,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            completion_tokens=len(turn.token_ids),
            logprobs=read_logprobs(request, turn, self.policies[request.model].dialogue.tokenizer),
            token_ids=tuple(turn.token_ids),
        )

    def _tokens_left(self, length: int, request: ModelRequest) -> int:
        """Return the number of tokens that the next turn can have; 0 or less: a limit is reached."""
        settings = self.settings
        has_turns_left = self.turns + len(self.open_generations) <= settings.max_turns
        if not has_turns_left or time.monotonic() >= self.ends_at:
            return 0
        limits = (settings.max_tokens - length, settings.max_turn_tokens, request.max_tokens)
        return min(limit for limit in limits if limit is not None)

    def _sampling_settings(self, request: ModelRequest, policy: Policy, capacity: int) -> dict[str, Any]:
        sampling = {
            **policy.sampling,
            **self.settings.sampling,
            "n": request.samples,
            "max_tokens": capacity,
            "stop_token_ids": policy.dialogue.stop_ids,
            "seed": self._random.getrandbits(48),
            "top_logprobs": request.logprobs or 0,
        }
        if self.settings.is_served:
            sampling |= client_sampling(request)
        grammar = choose_grammar(request, policy.dialogue)
        return sampling | ({"grammar": grammar} if grammar else {})
