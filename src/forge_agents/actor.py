"""The gateway as a component of a run: a separate process, whose sessions are lost with it and played again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from forge.envs.config import EpisodeConfig
from forge.runtime.controller import ForgeActor, Service, endpoint
from forge_http.web import bind_socket

from .gateway import Gateway
from .policies import Policy
from .record import SessionRecord
from .settings import Access, SessionSettings


@dataclass(frozen=True)
class PolicySettings:
    """A policy as a gateway's process builds it.

    service: of generators.
    model: the folder with its tokenizer.
    episode: how its messages become tokens.
    """

    service: Service
    model: str
    episode: EpisodeConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    whole_turns: bool = False

    def build(self) -> Policy:
        """Return the policy, with its tokenizer."""
        dialogue = self.episode.dialogue(self.model)
        return Policy(self.service, dialogue, self.sampling, self.whole_turns)


class GatewayActor(ForgeActor):
    """Serves the sessions of a run, on a port of 127.0.0.1.

    Args:
        policies: by the name that clients ask for.
    """

    vital = True

    def __init__(self, policies: Mapping[str, PolicySettings]) -> None:
        self.policies = policies
        self._served = AsyncExitStack()
        self._begun = asyncio.Lock()

    def setup(self) -> None:
        """Open the tokenizers; the server begins with the first session, in its event loop."""
        self.gateway = Gateway({name: settings.build() for name, settings in self.policies.items()})

    @endpoint
    async def open(self, settings: SessionSettings) -> Access:
        """Begin a session."""
        async with self._begun:
            if not self.gateway.url:
                await self._served.enter_async_context(self.gateway.listen(bind_socket("127.0.0.1", 0)))
        return self.gateway.open(settings)

    @endpoint
    async def close(self, key: str) -> SessionRecord:
        """End a session. KeyError: there is none, as its gateway was lost."""
        return await self.gateway.close(key)
