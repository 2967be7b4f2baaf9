"""The gateway as a component of a run: a separate process that may die and come back with its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.envs.config import EpisodeConfig
from forge.runtime.controller import ForgeActor, Service, endpoint

from .address import AddressConfig
from .gateway import Gateway
from .listener import take_listener
from .policies import Policy
from .provider import Provider
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
    trains: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    whole_turns: bool = False

    def build(self) -> Policy:
        """The policy, with its tokenizer."""
        dialogue = self.episode.dialogue(self.model)
        return Policy(self.service, dialogue, self.trains, self.sampling, self.whole_turns)


class GatewayActor(ForgeActor):
    """Serves the sessions of a run.

    Args:
        policies: by the name that clients ask for.
        listener: path of the `SharedListener` whose socket it serves.
        journal: folder of the sessions' journal.
        providers: of models that somebody else serves, by name.
        remote: the address for other machines, and the path of the `SharedListener` there.
    """

    vital = True

    def __init__(
        self,
        policies: Mapping[str, PolicySettings],
        listener: Path,
        journal: Path,
        providers: Mapping[str, Provider] | None = None,
        remote: tuple[AddressConfig, Path] | None = None,
    ) -> None:
        self.providers = providers
        self.remote = remote
        self.policies, self.listener, self.journal = policies, listener, journal
        self.gateway: Gateway | None = None
        self._begun = asyncio.Lock()
        self._server: asyncio.Task[None] | None = None

    def setup(self) -> None:
        """Open the tokenizers and read the journal; the server begins with the first call, in its event loop."""
        policies = {name: settings.build() for name, settings in self.policies.items()}
        self.gateway = Gateway(policies, self.journal, self.providers)

    async def on_respawn(self) -> None:
        """Serve at once: clients wait at the socket."""
        await self.listen()

    @endpoint
    async def listen(self) -> str:
        """Serve, if it does not yet; returns the address without `/v1`."""
        assert self.gateway is not None
        async with self._begun:
            if self._server is None:
                ready = asyncio.Event()
                self._server = asyncio.create_task(self._serve(self.gateway, ready))
                waiting = asyncio.create_task(ready.wait())
                await asyncio.wait({self._server, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self._server.done():
                    self._server.result()
        return self.gateway.url

    @endpoint
    async def open(self, settings: SessionSettings, key: str) -> Access:
        """Begin a session with this key; a repeated call finds it."""
        await self.listen()
        assert self.gateway is not None
        return self.gateway.open(settings, key)

    @endpoint
    async def close(self, key: str) -> SessionRecord:
        """End a session. KeyError: there is none."""
        await self.listen()
        assert self.gateway is not None
        return await self.gateway.close(key)

    @endpoint
    async def forget(self, key: str) -> None:
        """Drop the record and the journal of a closed session."""
        assert self.gateway is not None
        self.gateway.forget(key)

    async def _serve(self, gateway: Gateway, ready: asyncio.Event) -> None:
        async with AsyncExitStack() as served:
            await served.enter_async_context(gateway.listen(take_listener(self.listener)))
            if self.remote is not None:
                address, path = self.remote
                by_tls = gateway.listen_by_tls(take_listener(path), address.context(), address.name)
                await served.enter_async_context(by_tls)
            ready.set()
            await asyncio.Event().wait()
