"""The models that the clients of a session may ask, and the tokens that these models sample."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
