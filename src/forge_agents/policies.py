"""The models that the clients of a session may ask, and the tokens that these models sample."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.data.special_tokens import spell_token
from forge.types import Completion, Sampling
from forge_envs.dialogue import Dialogue

from .messages import BadRequest, ModelRequest, TokenLogprob

POLL = 0.05  # seconds between two looks at a stream: at each step of a small model they would cost more than the step


@dataclass(slots=True)
class Policy:
    """A model that clients know by a name.

    service: of `forge.actors.Generator`.
    dialogue: converts its messages and tokens.
    sampling: the run's settings, which a client cannot change.
    chat_error: why the tokenizer's template cannot render messages; "": it can.
    whole_turns: sample a turn in one request even where the client streams: for what streams lack, such as experts.
    """

    service: Any
    dialogue: Dialogue
    sampling: Mapping[str, Any] = field(default_factory=dict)
    whole_turns: bool = False
    chat_error: str = ""


async def sample_turns(
    policy: Policy, session: str, prompt: Sequence[int], sampling: Mapping[str, Any], *, streamed: bool
) -> AsyncGenerator[list[tuple[int, Completion]]]:
    """Sample `sampling["n"]` turns after a prompt: lists of (sample, new tokens), whose last piece has a `finish`.

    Raises:
        StreamLost: the generator of a stream is gone, and what it has sampled with it.
    """
    service = policy.service
    async with service.session(session):
        if policy.whole_turns or not streamed:
            completions = await service.generate.route(list(prompt), **sampling)
            yield list(enumerate(completions))
            return

        number = secrets.randbits(63)
        running = sampling["n"]
        try:
            await service.open_stream.route(list(prompt), stream=number, **sampling)
            while running:
                pieces = await service.next_pieces.route(number)
                running -= sum(bool(piece.finish) for _, piece in pieces)
                if pieces:
                    yield pieces
                if running:
                    await asyncio.sleep(POLL)
        finally:
            await service.close_stream.route(number)


NUMBERS = ("temperature", "top_p", "top_k", "seed")


def client_sampling(request: ModelRequest) -> dict[str, Any]:
    """Return the fields of `Sampling` that a request has, in any dialect. BadRequest: an invalid value."""
    values = {name: value for name, value in request.overridden.items() if name in NUMBERS}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"{name} must be a number", name)
    try:
        # Off is -1 for some clients.
        values |= {"top_k": max(int(values["top_k"]), 0)} if "top_k" in values else {}
        Sampling(**values)
    except (ValueError, OverflowError) as error:
        raise BadRequest(str(error)) from None
    return values


def choose_grammar(request: ModelRequest, dialogue: Dialogue) -> str:
    """Return the grammar of the turn; "" for any text. BadRequest: the client asks for a form without a grammar."""
    if request.schema is None and request.tool_choice in ("auto", "none"):
        return ""
    from forge_agents.grammar import calls_grammar, json_grammar

    field = "response_format" if request.schema is not None else "tool_choice"
    try:
        if request.schema is not None:
            return json_grammar(request.schema)
        choice = request.tool_choice.removeprefix("function:")
        added = dialogue.tokenizer.get_added_vocab()
        return calls_grammar(dialogue.syntax, request.tools, choice, request.parallel_calls, added)
    except ValueError as error:
        raise BadRequest(str(error), field) from None


def read_logprobs(request: ModelRequest, turn: Completion, tokenizer: Any) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities that a request asks for."""
    if request.logprobs is None:
        return ()
    names = [spell_token(tokenizer, token)[0] for token in turn.token_ids]
    tops = turn.top_logprobs or [{} for _ in names]
    return tuple(
        TokenLogprob(name, logprob, tuple((spell_token(tokenizer, other)[0], value) for other, value in top.items()))
        for name, logprob, top in zip(names, turn.logprobs, tops, strict=True)
    )
