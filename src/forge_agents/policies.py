"""The policies that the clients of a session may ask, and how the turns of an answer are sampled from them."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.data.special_tokens import spell_token
from forge.types import Completion, Sampling
from forge_envs.dialogue import Dialogue

from .messages import BadRequest, Delta, ModelRequest, ModelTurn, TokenLogprob

# Seconds between two requests for the new pieces of a stream. A request at each step of a small model would take longer
# than the step.
POLL = 0.05


@dataclass(slots=True)
class Policy:
    """Model that clients of the gateway request by name.

    service: a service of `forge.actors.Generator`.
    dialogue: converts messages to tokens and back.
    sampling: the run's sampling settings, fields of `forge.types.Sampling`.
    whole_turns: sample a turn in one request even where the client streams, since a stream does not return all that is
        recorded, such as the experts of each token.
    chat_error: why the tokenizer's chat template cannot render messages; "": it can.
    """

    service: Any
    dialogue: Dialogue
    sampling: Mapping[str, Any] = field(default_factory=dict)
    whole_turns: bool = False
    chat_error: str = ""


async def sample_turns(
    policy: Policy, session: str, prompt: Sequence[int], sampling: Mapping[str, Any], *, streamed: bool
) -> AsyncGenerator[list[tuple[int, Completion]]]:
    """Sample turns after a prompt, and yield lists of (number of the sample, its new tokens) as they arrive.

    The last piece of each sample has a `finish`.

    Args:
        session: requests with the same name are sent to the same replica of the service.
        prompt: token ids.
        sampling: fields of `forge.types.Sampling`; "n" is the number of samples.
        streamed: yield pieces while they are sampled; False: yield all samples at once, complete.

    Raises:
        StreamLost: the generator has died, and the tokens that it had sampled are lost.
    """
    service = policy.service
    async with service.session(session):
        if policy.whole_turns or not streamed:
            yield list(enumerate(await service.generate.route(list(prompt), **sampling)))
            return

        stream_id = secrets.randbits(63)
        unfinished = sampling["n"]  # samples
        try:
            await service.open_stream.route(list(prompt), stream=stream_id, **sampling)
            while unfinished:
                pieces = await service.next_pieces.route(stream_id)
                unfinished -= sum(bool(piece.finish) for _, piece in pieces)
                if pieces:
                    yield pieces
                if unfinished:
                    await asyncio.sleep(POLL)
        finally:
            await service.close_stream.route(stream_id)


@dataclass(eq=False)
class Generation:
    """The answer to one request while it is generated.

    ids: the ids of its samples.
    turns: the complete samples, once they are all sampled.
    news: pieces of the samples for the connection that sends them; None once the task has ended.
    task: generates the answer.
    """

    request: ModelRequest
    ids: tuple[str, ...]
    turns: list[ModelTurn] = field(default_factory=list)
    prompt_tokens: int = 0
    news: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] = field(init=False)

    def put_text(self, sample: int, kind: str, text: str) -> None:
        """Queue a piece of a sample's text, whose kind is "thought" or "content"."""
        self.news.put_nowait(Delta(sample, thought=text) if kind == "thought" else Delta(sample, content=text))

    async def pieces(self, interval: float) -> AsyncIterator[Delta | None]:
        """Yield the pieces of the answer as they arrive, and None after each `interval` seconds without one.

        Raises:
            Exception: the one with which the generation failed, after all of its pieces.
        """
        while True:
            try:
                piece = await asyncio.wait_for(self.news.get(), interval)
            except TimeoutError:
                yield None
                continue
            if piece is None:
                break
            yield piece
        self.task.result()


NUMBERS = ("temperature", "top_p", "top_k", "seed")


def client_sampling(request: ModelRequest) -> dict[str, Any]:
    """Return the sampling settings of a client's request, as fields of `forge.types.Sampling`.

    Raises:
        BadRequest: a value is not a number, or outside its range.
    """
    values = {name: value for name, value in request.overridden.items() if name in NUMBERS}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"{name} must be a number", name)
    try:
        # Some clients send -1 to switch top_k off, where `Sampling` has 0.
        if "top_k" in values:
            values["top_k"] = max(int(values["top_k"]), 0)
        Sampling(**values)
    except (ValueError, OverflowError) as error:
        raise BadRequest(str(error)) from None
    return values


def choose_grammar(request: ModelRequest, dialogue: Dialogue) -> str:
    """Return the grammar that a turn must satisfy, for a JSON schema or a required tool call; "" for any text.

    Raises:
        BadRequest: the grammar of this schema, or of calls in the policy's syntax, is not supported.
    """
    if request.schema is None and request.tool_choice in ("auto", "none"):
        return ""
    # Imported here: grammars are optional, and few requests need one.
    from forge_agents.grammar import calls_grammar, json_grammar

    field = "response_format" if request.schema is not None else "tool_choice"
    try:
        if request.schema is not None:
            return json_grammar(request.schema)
        choice = request.tool_choice.removeprefix("function:")
        return calls_grammar(
            dialogue.syntax, request.tools, choice, request.parallel_calls, dialogue.tokenizer.get_added_vocab()
        )
    except ValueError as error:
        raise BadRequest(str(error), field) from None


def read_logprobs(request: ModelRequest, turn: Completion, tokenizer: Any) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of a turn's tokens, with the most probable tokens at each; () if not requested."""
    if request.logprobs is None:
        return ()

    def spell(token: int) -> str:
        return spell_token(tokenizer, token)[0]

    top_logprobs = turn.top_logprobs or [{} for _ in turn.token_ids]
    return tuple(
        TokenLogprob(spell(token), logprob, tuple((spell(other), value) for other, value in top.items()))
        for token, logprob, top in zip(turn.token_ids, turn.logprobs, top_logprobs, strict=True)
    )
