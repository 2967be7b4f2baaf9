"""The models that the clients of a session may ask, and the tokens that these models sample."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from forge.actors.streams import StreamLost
from forge.engines.interface import extend
from forge.types import Completion
from forge_envs.dialogue import Dialogue

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

    A stream whose generator dies continues from the tokens that it has.
    """
    async with policy.service.session(session):
        if policy.whole_turns or not streamed:
            completions = await policy.service.generate.route(list(prompt), **sampling)
            yield list(enumerate(completions))
            return
        async with aclosing(_streamed(policy.service, prompt, sampling)) as pieces:
            async for piece in pieces:
                yield piece


async def _streamed(
    service: Any, prompt: Sequence[int], sampling: Mapping[str, Any]
) -> AsyncGenerator[list[tuple[int, Completion]]]:
    count = sampling["n"]
    turns = [Completion() for _ in range(count)]
    try:
        async with aclosing(_stream(service, prompt, sampling)) as pieces:
            async for new in pieces:
                for sample, piece in new:
                    extend(turns[sample], piece)
                yield new
        return
    except StreamLost:
        # A grammar knows only its own tokens, so a constrained turn starts again, unless a part of it was sent.
        if sampling.get("grammar") and any(turn.token_ids for turn in turns):
            raise
    for sample, turn in enumerate(turns):
        if turn.finish:
            continue
        room = sampling["max_tokens"] - len(turn.token_ids)
        options = {**sampling, "n": 1, "max_tokens": room, "seed": sampling["seed"] + 1 + sample}
        async with aclosing(_streamed(service, [*prompt, *turn.token_ids], options)) as pieces:
            async for new in pieces:
                yield [(sample, piece) for _, piece in new]


async def _stream(
    service: Any, prompt: Sequence[int], sampling: Mapping[str, Any]
) -> AsyncGenerator[list[tuple[int, Completion]]]:
    """One stream of a generator. StreamLost: its generator is gone."""
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
