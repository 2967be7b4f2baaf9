"""Weights between hosts. Each host has a store in its shared memory, and a keeper that copies versions into it.

    store = await share(store)      # in the controller, once its hosts are attached
    Generator.options(hosts=2).as_service(..., store=store)

A version stays in the memory of the hosts that wrote it; the home store, on the controller's host, has its manifest. A
process that reads a version has its host's keeper copy it once for all processes there. Keepers form a chain: each
reads from the one that asked before it, chunk by chunk as they arrive there, through RDMA windows (InfiniBand where it
is, TCP otherwise). So a version leaves its writer once, and reaches n hosts in the time of one transfer and n chunks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..runtime.cluster import HOST, STORE
from ..runtime.controller import ForgeActor, endpoint, runtime
from ..runtime.controller.rdma import Window
from ..runtime.store import MissingVersion, Store, VersionStore
from ..runtime.store.manifest import Manifest
from ..runtime.store.transfer import OpenVersion, RankPart, Ranks

log = logging.getLogger(__name__)

CHUNK = 16 << 20  # bytes
GRACE = 15.0  # seconds that a call may take beyond the limit of what it asks for
CHUNK_TIMEOUT = 60.0  # seconds for one of them
RETRY = 2.0  # seconds between attempts to read a version whose writers are lost
THREADS = 1024  # of a home keeper: each waits for the other ranks of a put
IDLE = 60.0  # seconds after which a keeper lets go of memory that no other one has asked for
HOME = "home"  # the host of the controller
COPY = "copy"  # what a host's store calls a version that was copied to it


@dataclass
class Source:
    """A segment that other keepers read from, while it arrives or later. `ready` counts its chunks."""

    memory: Tensor
    ready: int
    held: ExitStack
    windows: dict[int, Window] = field(default_factory=dict)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None
    idle: asyncio.TimerHandle | None = None

    def arrived(self, chunks: int) -> None:
        """Announce that so many chunks can be read."""
        self.ready = chunks
        self.grown.set()
        self.grown = asyncio.Event()


class Keeper(ForgeActor):
    """Of one host. The one at home knows where every version is. A run continues without that of a bad host.

    Args:
        store: of the home host.
        home: its keeper; None: this is it, and `link` gives it its own handle.
    """

    vital = False

    def __init__(self, store: VersionStore, home: Any = None) -> None:
        self.home_store, self._home, self._at_home = store, home, home is None

    def setup(self) -> None:
        """Open the store of this host. ValueError: it is on another host."""
        self.host, self.store = whereabouts(self.home_store)
        if not self.store.is_local():
            raise ValueError(f"the keeper of {self.store.root} must run on the host where it is")
        self._sources: dict[str, Source] = {}
        self._fetching: dict[tuple[str, int], asyncio.Task[str]] = {}
        self._chains: dict[tuple[str, int], list[str]] = {}
        self._publishing = ThreadPoolExecutor(THREADS, thread_name_prefix="forge-publish")

    @endpoint
    async def link(self, home: Any) -> None:
        """Give the home keeper a handle to itself, by which it reaches the others."""
        self._home = home

    @endpoint
    async def publish(self, part: str, ranks: Ranks, timeout: float) -> int:
        """Publish one rank's part, whose segment is on another host; see `VersionStore.put`. At home."""
        put = partial(self.store.publish, Manifest.from_json(part), ranks, timeout)
        return await asyncio.get_running_loop().run_in_executor(self._publishing, put)

    @endpoint
    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the home store answers to `method`. At home."""
        return await asyncio.to_thread(getattr(self.store, method), *args, **kwargs)

    @endpoint
    async def locate(self, key: str, version: int, host: str, avoid: list[str]) -> tuple[str, str | None]:
        """The manifest of a version, and the keeper that `host` is to read it from; None: those of the hosts that wrote
        it. At home.

        Args:
            avoid: keepers that did not answer.

        Raises:
            MissingVersion: it was never published, or is no longer kept.
        """
        if version not in (held := await asyncio.to_thread(self.store.versions, key)):
            raise MissingVersion(f"{key} version {version} is not in the store; it holds {held or 'none'}")
        manifest = await asyncio.to_thread(self.store.manifest, key, version)
        for old in [chained for chained in self._chains if chained[0] == key and chained[1] < version - 8]:
            del self._chains[old]
        chain = self._chains.setdefault((key, version), [])
        if host not in chain:
            chain.append(host)
        before = [other for other in chain[: chain.index(host)] if other not in avoid]
        return manifest.on_host(HOME).to_json(), before[-1] if before else None

    @endpoint
    async def fetch(self, key: str, version: int, timeout: float) -> str:
        """Have a version in this host's store; returns its manifest there.

        Raises:
            MissingVersion: no host has it any more. TimeoutError: it did not arrive in time.
        """
        if (key, version) not in self._fetching:
            task = asyncio.get_running_loop().create_task(self._fetch(key, version, time.monotonic() + timeout))
            self._fetching[key, version] = task
            task.add_done_callback(lambda _: self._fetching.pop((key, version)))
        # One caller that stops waiting must not end the transfer of all.
        return await asyncio.wait_for(asyncio.shield(self._fetching[key, version]), timeout)

    @endpoint
    async def chunk(self, segment: str, index: int, size: int) -> Window:
        """A window to a chunk, of `size` bytes, of a segment that is here, or arrives here.

        Raises:
            MissingVersion: it is not.
        """
        end = time.monotonic() + CHUNK_TIMEOUT
        while segment not in self._sources:
            if place(segment) == self.host:
                held = ExitStack()
                memory = await asyncio.to_thread(self._open, segment, held)
                opened = Source(memory, -(-len(memory) // CHUNK), held)
                if self._sources.setdefault(segment, opened) is not opened:  # another request was quicker
                    held.close()
            elif not self._fetching or time.monotonic() > end:
                raise MissingVersion(f"{segment} is not on {self.host}")
            else:
                await asyncio.sleep(0.01)
        source = self._sources[segment]
        self._use(segment, source)
        while source.ready <= index:
            if source.error is not None:
                raise MissingVersion(source.error)
            await asyncio.wait_for(source.grown.wait(), CHUNK_TIMEOUT)
        if index not in source.windows:
            source.windows[index] = Window(source.memory[index * CHUNK : index * CHUNK + size])
        return source.windows[index]

    async def _fetch(self, key: str, version: int, end: float) -> str:
        avoid: list[str] = []
        while True:
            text, parent = await self._home.locate.route(key, version, self.host, avoid)
            manifest = Manifest.from_json(text)
            foreign = sorted(segment for segment in manifest.segments if place(segment) != self.host)
            names = {segment: bare(segment) for segment in manifest.segments}
            try:
                with ExitStack() as writing:
                    for segment in foreign:
                        names[segment] = await self._copy(segment, manifest.extent(segment), parent, writing)
                    here = manifest.renamed(names)
                    await asyncio.to_thread(self.store.keep_part, here, COPY)
                for segment in foreign:  # their memory is not reused while others read it
                    if segment in self._sources:
                        held = self._sources[segment].held
                        await asyncio.to_thread(held.enter_context, self.store.segments.reading([names[segment]]))
                return here.to_json()
            except (KeyError, RuntimeError, TimeoutError) as error:  # it, a keeper, or a host is gone
                for segment in foreign:  # the memory of what did arrive is not kept
                    if (arrived := self._sources.get(segment)) is not None:
                        await self._release(segment, arrived)
                writers = ", ".join(sorted({place(segment) for segment in foreign}))
                if parent is None and time.monotonic() > end - RETRY:
                    raise MissingVersion(
                        f"{key} version {version} could not be read from {writers}: {error}"
                    ) from error
                log.warning("%s version %d could not be read from %s: %s", key, version, parent or writers, error)
                if parent is not None:
                    avoid.append(parent)
                else:  # its trainer is replaced, and publishes it again
                    await asyncio.sleep(RETRY)

    async def _copy(self, segment: str, size: int, parent: str | None, writing: ExitStack) -> str:
        """Copy a segment from a keeper into this host's store; returns its name here."""
        name, memory = await asyncio.to_thread(writing.enter_context, self.store.segments.writing(size))
        chunk = self._home.named(keeper_name(parent or place(segment))).chunk.options(timeout=CHUNK_TIMEOUT)
        source = self._sources[segment] = Source(memory, 0, ExitStack())
        parts = memory.split(CHUNK)
        try:
            window: Window = await chunk.route(segment, 0, len(parts[0]))
            for number, part in enumerate(parts, 1):
                read = window.read_into(part, CHUNK_TIMEOUT)
                if number < len(parts):  # ask for the next one meanwhile
                    window, _ = await asyncio.gather(chunk.route(segment, number, len(parts[number])), read)
                else:
                    await read
                source.arrived(number)
        except BaseException as error:
            source.error = f"{segment} did not arrive on {self.host}: {error}"
            source.grown.set()
            self._sources.pop(segment, None)
            raise
        self._use(segment, source)
        return name

    def _open(self, segment: str, held: ExitStack) -> Tensor:
        """The memory of a segment that was written on this host."""
        try:
            return held.enter_context(self.store.segments.reading([bare(segment)]))[bare(segment)]
        except FileNotFoundError:
            raise MissingVersion(f"{segment} is on {self.host} no more") from None

    def _use(self, segment: str, source: Source) -> None:
        """Keep a source for a while."""
        if source.idle is not None:
            source.idle.cancel()
        loop = asyncio.get_running_loop()
        source.idle = loop.call_later(IDLE, lambda: loop.create_task(self._release(segment, source)))

    async def _release(self, segment: str, source: Source) -> None:
        if self._sources.get(segment) is source:
            del self._sources[segment]
        if source.idle is not None:
            source.idle.cancel()
        windows, source.windows = source.windows, {}
        await asyncio.gather(*(window.close() for window in windows.values()))
        source.held.close()


class Reach:
    """A store as it is handed to components: in each process `connect` gives the way to it that is open there.

    Args:
        store: of the home host.
        home: its keeper.
    """

    def __init__(self, store: VersionStore, home: Any) -> None:
        self.store, self._home = store, home

    def connect(self) -> Store:
        """The store as this process can use it."""
        host, local = whereabouts(self.store)
        return HostStore(host, local, self._home, self._home.named(keeper_name(host)))


async def share(store: VersionStore) -> VersionStore | Reach:
    """Have a store reach all hosts of this controller, also those that come later. Without hosts it is as it was."""
    running = runtime()
    if (pool := running.placement.pool) is None:
        return store

    async def start() -> Reach:
        home = await Keeper.options(mesh_name=keeper_name(HOME)).as_actor(store)
        await home.link.call_one(home)

        async def attend(host: str) -> None:
            keeper = running.services.get(keeper_name(host))
            if keeper is None:
                await Keeper.options(mesh_name=keeper_name(host), host=host).as_actor(store, home)
            else:  # of a host that came back: it waits for it, or was given up
                await keeper.scale(1)

        async def replace_lost(host: str) -> None:
            """Have the trainer publish again what only the lost host had: others may be waiting for it."""
            known = store.keys()
            for key in known:
                newest = store.versions(key)[-1]
                if store.publisher is not None and any(place(s) == host for s in store.manifest(key, newest).segments):
                    await store.publisher(newest)

        pool.on_lost.append(replace_lost)
        pool.on_up(attend)
        return Reach(store, home)

    if running.shared is None:
        running.shared = asyncio.ensure_future(start())
    return await running.shared


def connect(store: Store | Reach | None) -> Store | None:
    """What a component was given as a store, as it can use it; to be called in its process."""
    return store.connect() if isinstance(store, Reach) else store


def home(store: Store | Reach | None) -> Store | None:
    """What a component was given as a store, in the controller: the store itself."""
    return store.store if isinstance(store, Reach) else store


def whereabouts(store: VersionStore) -> tuple[str, VersionStore]:
    """The host of this process, and the store in its memory; `store` is that of the home host."""
    if store.is_local():
        return HOME, store
    local = VersionStore(os.environ[STORE], store.keep)
    local.prepare()
    return os.environ[HOST], local


def keeper_name(host: str) -> str:
    """The service of a host's keeper."""
    return "keeper_" + re.sub(r"\W", "_", host)


def place(segment: str) -> str:
    """The host of a segment's full name."""
    return segment.partition("@")[2]


def bare(segment: str) -> str:
    """A segment's name on its host."""
    return segment.partition("@")[0]


class HostStore(Store):
    """The store of a run on several hosts, for the processes of one. Its methods block: call them from a thread, within
    an endpoint.

    Args:
        host: of this process.
        local: the store in this host's memory.
        home, keeper: the keepers of the home host and of this one.
        timeout: seconds for one transfer.
    """

    def __init__(self, host: str, local: VersionStore, home: Any, keeper: Any, timeout: float = 300.0) -> None:
        self.host, self.local, self._home, self._keeper, self._timeout = host, local, home, keeper, timeout
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="forge-host-store", daemon=True).start()

    def put(
        self,
        key: str,
        value: Tensor | Mapping[str, Any],
        version: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        timeout: float = 300.0,
    ) -> int:
        """Publish here if the store is on this host, otherwise send the parts to its host."""
        if self.host == HOME:
            return self.local.put(key, value, version, dtype=dtype, timeout=timeout)
        part = RankPart.of_value(key, value, version, dtype)
        with self.local.segments.writing(max(part.size, 1)) as (name, memory):
            written = part.write(name, memory)
            text = written.on_host(self.host).to_json()
            number = self._wait(self._home.publish.route(text, part.ranks, timeout))
            # Before the segment is unlocked: other processes of this host may reuse it then.
            self.local.keep_part(replace(written, version=number), f"rank{part.ranks.rank}")
        return number

    @contextmanager
    def open(self, key: str, version: int | None = None) -> Iterator[OpenVersion]:
        """Fetch a version to this host once, and read it from there."""
        if version is None:
            versions = self.versions(key)
            version = versions[-1] if versions else 0
        manifest = self.local.part(key, version, COPY)
        for last in (False, True):
            if manifest is None or last:
                fetched = self._keeper.fetch.options(timeout=self._timeout + GRACE).route(key, version, self._timeout)
                manifest = Manifest.from_json(self._wait(fetched))
            try:
                with self.local.segments.reading(manifest.segments) as memory:
                    yield OpenVersion(manifest, memory)
                    return
            except FileNotFoundError:  # its memory was reused since
                if last:
                    raise MissingVersion(f"{key} version {version} left {self.host} while it was opened") from None

    def versions(self, key: str) -> list[int]:
        """Complete versions on the store's host."""
        return self._ask("versions", key)

    def keys(self, prefix: str = "") -> list[str]:
        """Keys on the store's host."""
        return self._ask("keys", prefix)

    def delete(self, key: str) -> None:
        """Delete on the store's host."""
        return self._ask("delete", key)

    def wait(self, key: str, min_version: int = 0, *, timeout: float) -> int:
        """Wait on the store's host."""
        return self._ask("wait", key, min_version, timeout=timeout)

    def manifest(self, key: str, version: int) -> Manifest:
        """Manifest of a version on the store's host."""
        return self._ask("manifest", key, version)

    def identities(self, key: str) -> dict[int, set[str]]:
        """Known identities on the store's host."""
        return self._ask("identities", key)

    def adopt(self, key: str, identities: Mapping[int, set[str]]) -> None:
        """Add identities on the store's host."""
        return self._ask("adopt", key, identities)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.host == HOME:
            return getattr(self.local, method)(*args, **kwargs)
        return self._wait(self._home.ask.route(method, *args, **kwargs))

    def _wait(self, work: Any) -> Any:
        # The keepers' calls have limits of their own.
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
