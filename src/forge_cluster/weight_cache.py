"""Weights between hosts: each host has a store in its shared memory, and a cache that copies versions into it.

A version stays in the memory of the hosts that wrote it; the home store, on the controller's host, has its manifest. To
read a version a process asks its host's cache, which copies it once for all processes there. Caches form a chain: each
reads from the one that asked before it, chunk by chunk as they arrive there, through RDMA windows (by InfiniBand if the
host has it, otherwise by TCP). So a version leaves its writer once, and reaches n hosts in the time of one transfer and
n chunks.
"""

import asyncio
import logging
import os
import re
import time
import warnings
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning
from torch import Tensor

from forge.observability import Reduce, record_metric
from forge.runtime.controller import (
    ForgeActor,
    _monarch,  # noqa: F401  (Monarch needs its settings first)
    endpoint,
)
from forge.runtime.controller.remote_service import RemoteService
from forge.runtime.names import HOST, STORE
from forge.runtime.store import MissingVersion, VersionStore
from forge.runtime.store.manifest import Manifest
from forge.system.files import write_atomic


def open_window(memory: Tensor) -> RDMABuffer:
    """Return a window by which other processes can read memory of this one, uint8 [size], once they receive it.

    Call it within an endpoint. The memory must not be freed before `drop` of the window has ended.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        return RDMABuffer(memory)


class HostVersions(VersionStore):
    """A `VersionStore` that also keeps segments of versions whose manifest is in another host's store."""

    def keep_part(self, part: Manifest, name: str) -> None:
        """Keep segments on this host of a version that is published on another: the part of a rank, or a copy.

        Args:
            name: of the rank or the copy; the newest `keep` versions of each name are kept.
        """
        with self._hold_lock():
            folder = self._key_folder(part.key) / "parts" / name
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / f"{part.version}.json", part.to_json())
            for old in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))[: -self.keep]:
                old.unlink()
            self.segments.reclaim(self._referenced_segments())

    def part(self, key: str, version: int, name: str) -> Manifest | None:
        """Return the manifest that `keep_part` was given with this name; None if it is no longer kept."""
        path = self._key_folder(key) / "parts" / name / f"{version}.json"
        try:
            return Manifest.from_json(path.read_text(errors="replace"))
        except FileNotFoundError:
            return None


log = logging.getLogger(f"forge.{__name__}")

# Bytes; large enough that the set-up of a window takes a small part of the time, small enough that the next host in the
# chain starts early.
CHUNK = 16 << 20
# Chunks that are read at a time. At 1 Gbit/s, 210 MB took 2.19 s with one, 2.06 with two, 1.94 with three; the wire
# alone takes 1.68.
READS = 3
CHUNK_TIMEOUT = 60  # seconds for a chunk
RETRY_DELAY = 2.0  # seconds between attempts to read a version whose writers are lost
IDLE = 60.0  # seconds after which a cache closes memory that no other cache has asked for
KEPT_CHAINS = 8  # number of last versions of which the home cache keeps the chain
HOME = "home"  # name of the controller's host
COPY = "copy"  # name of copies in `HostVersions.keep_part`


@dataclass
class Source:
    """A segment that other caches read, while it arrives or later. `ready` is the number of chunks that are here."""

    memory: Tensor
    ready: int
    resources: ExitStack
    windows: dict[int, RDMABuffer] = field(default_factory=dict)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None
    version: tuple[str, int] | None = None  # key and number, if the segment came from another host
    idle_timer: asyncio.TimerHandle | None = None

    def announce(self, chunks: int) -> None:
        """Note that this many chunks have arrived, and wake the readers that wait for one."""
        self.ready = chunks
        self.grown.set()
        self.grown = asyncio.Event()


class WeightCache(ForgeActor):
    """The weight cache of one host. The home cache knows where every version is; a run survives the loss of any other.

    Args:
        store: the store of the home host.
        home: a handle to the home cache; None if this is the home cache, which gets a handle to itself by `link`.
    """

    vital = False

    def __init__(self, store: VersionStore, home: RemoteService | None = None) -> None:
        self.home_store = store
        self.home: RemoteService = home  # type: ignore[assignment]

    def setup(self) -> None:
        """Open the store of this host. ValueError: the store is on another host."""
        self.host, self.store = local_store(self.home_store)
        if not self.store.is_local():
            raise ValueError(f"the weight cache of {self.store.root} must run on the host where it is")
        self._sources: dict[str, Source] = {}
        self._fetching: dict[tuple[str, int], asyncio.Task[str]] = {}
        self._chains: dict[tuple[str, int], list[str]] = {}

    @endpoint
    async def link(self, home: RemoteService) -> None:
        """Give the home cache a handle to itself, by which it finds the other caches."""
        self.home = home

    @endpoint
    async def publish(self, parts: list[str]) -> int:
        """Publish the manifests of all ranks, as JSON, as a version and return its number; for the home cache only."""
        return await asyncio.to_thread(self.store.publish, [Manifest.from_json(part) for part in parts])

    @endpoint
    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the home store and return its result; for the home cache only."""
        return await asyncio.to_thread(getattr(self.store, method), *args, **kwargs)

    @endpoint
    async def locate(self, key: str, version: int, host: str, avoid: list[str]) -> tuple[str, str | None]:
        """Return the manifest of a version as JSON, and the host from whose cache `host` reads it; home cache only.

        The host is None if `host` reads from those that wrote the version.

        Args:
            avoid: hosts whose caches did not answer.

        Raises:
            MissingVersion: the version was never published, or is no longer kept.
        """
        versions = await asyncio.to_thread(self.store.versions, key)
        if version not in versions:
            raise MissingVersion(f"{key} version {version} is not in the store; it holds {versions or 'none'}")
        manifest = await asyncio.to_thread(self.store.manifest, key, version)
        for outdated in [link for link in self._chains if link[0] == key and link[1] < version - KEPT_CHAINS]:
            del self._chains[outdated]
        # Each host reads from the one that asked before it; a host that asks again keeps its position in the chain.
        chain = self._chains.setdefault((key, version), [])
        if host not in chain:
            chain.append(host)
        earlier_hosts = [name for name in chain[: chain.index(host)] if name not in avoid]
        return manifest.on_host(HOME).to_json(), earlier_hosts[-1] if earlier_hosts else None

    @endpoint
    async def fetch(self, key: str, version: int, timeout: float) -> str:
        """Copy a version into this host's store unless it is there; return the manifest of the copy as JSON.

        Raises:
            MissingVersion, TimeoutError: no host has it any more, or it did not arrive within `timeout` seconds.
        """
        if (key, version) not in self._fetching:
            task = asyncio.get_running_loop().create_task(self._fetch_version(key, version, time.monotonic() + timeout))
            self._fetching[key, version] = task
            task.add_done_callback(lambda _: self._fetching.pop((key, version)))
        # Shielded: a caller that stops waiting must not end the transfer for the others.
        return await asyncio.wait_for(asyncio.shield(self._fetching[key, version]), timeout)

    @endpoint
    async def chunk(self, name: str, index: int, size: int) -> RDMABuffer:
        """Return a window to chunk number `index`, of `size` bytes, of a segment, once the chunk is on this host.

        Args:
            name: of the segment, as `whole_name` returns it.

        Raises:
            MissingVersion: the segment is neither on this host nor on the way to it.
        """
        deadline = time.monotonic() + CHUNK_TIMEOUT
        while name not in self._sources:
            if host_of(name) == self.host:
                resources = ExitStack()
                memory = await asyncio.to_thread(self._open_segment, name, resources)
                opened = Source(memory, -(-len(memory) // CHUNK), resources)
                if self._sources.setdefault(name, opened) is not opened:  # another request has opened it meanwhile
                    resources.close()
            elif not self._fetching or time.monotonic() > deadline:
                raise MissingVersion(f"{name} is not on {self.host}")
            else:
                # The chain may ask for a segment before the transfer to this host has started.
                await asyncio.sleep(0.01)

        source = self._sources[name]
        self._restart_idle_timer(name, source)
        while source.ready <= index:
            if source.error is not None:
                raise MissingVersion(source.error)
            await asyncio.wait_for(source.grown.wait(), CHUNK_TIMEOUT)

        if index not in source.windows:
            source.windows[index] = open_window(source.memory[index * CHUNK : index * CHUNK + size])
        return source.windows[index]

    async def _fetch_version(self, key: str, version: int, deadline: float) -> str:
        avoid: list[str] = []
        while True:
            text, parent = await self.home.locate.route(key, version, self.host, avoid)
            manifest = Manifest.from_json(text)
            # Segments on other hosts, each with the name under which caches send it.
            foreign = {
                segment: whole_name(manifest.within(segment))
                for segment in sorted(manifest.segments)
                if host_of(segment) != self.host
            }

            try:
                return await self._copy_version(manifest, foreign, parent)
            except (KeyError, RuntimeError, TimeoutError) as error:  # the version, a cache, or a host is lost
                # Segments that did arrive are released: the next attempt copies all of them.
                for name in foreign.values():
                    if name in self._sources:
                        await self._release_source(name, self._sources[name])

                writers = ", ".join(sorted({host_of(segment) for segment in foreign}))
                if parent is None and time.monotonic() > deadline - RETRY_DELAY:
                    raise MissingVersion(
                        f"{key} version {version} could not be read from {writers}: {error}"
                    ) from error
                log.warning("%s version %d could not be read from %s: %s", key, version, parent or writers, error)
                if parent is not None:
                    avoid.append(parent)
                else:  # the lost trainer is replaced, and publishes the version again
                    await asyncio.sleep(RETRY_DELAY)

    async def _copy_version(self, manifest: Manifest, foreign: dict[str, str], parent: str | None) -> str:
        """Copy the foreign segments of a version into this host's store; return the manifest of the copy as JSON."""
        start = time.monotonic()
        names = {segment: local_name(segment) for segment in manifest.segments}
        with ExitStack() as writing:
            for segment in foreign:
                names[segment] = await self._copy_segment(manifest.within(segment), parent, writing)
            copied = manifest.renamed(names)
            await asyncio.to_thread(self.store.keep_part, copied, COPY)

        # The memory is not reused while other caches read it.
        for segment, name in foreign.items():
            if name in self._sources:
                lock = self.store.segments.reading([names[segment]])
                await asyncio.to_thread(self._sources[name].resources.enter_context, lock)

        # Release versions before the last but one: a run that updates often would otherwise hold all of a minute.
        assert manifest.version is not None
        for name, source in [*self._sources.items()]:
            key, version = source.version or ("", 0)
            if key == manifest.key and version < manifest.version - 1:
                await self._release_source(name, source)

        if foreign:
            record_metric("weight_sync/bytes", sum(map(manifest.extent, foreign)), Reduce.SUM)
            record_metric("weight_sync/seconds", time.monotonic() - start, Reduce.MEAN)
        return copied.to_json()

    async def _copy_segment(self, wanted: Manifest, parent: str | None, writing: ExitStack) -> str:
        """Copy the only segment of a manifest from another host into this host's store; return its name here."""
        (segment,) = wanted.segments
        whole, size = whole_name(wanted), wanted.extent(segment)
        name, memory = await asyncio.to_thread(writing.enter_context, self.store.segments.writing(size))
        cache = self.home.named(cache_name(parent or host_of(segment)))
        assert wanted.version is not None
        source = Source(memory, 0, ExitStack(), version=(wanted.key, wanted.version))
        self._sources[whole] = source

        try:
            await self._receive_chunks(whole, source, cache)
        except BaseException as error:
            # The remaining chunks will never arrive: their readers raise MissingVersion.
            source.error = f"{whole} did not arrive on {self.host}: {error}"
            source.grown.set()
            if self._sources.get(whole) is source:
                del self._sources[whole]
            raise

        self._restart_idle_timer(whole, source)
        return name

    async def _receive_chunks(self, name: str, source: Source, cache: RemoteService) -> None:
        """Read a segment from another cache, READS chunks at a time, and announce each chunk when it is here."""
        chunk = cache.chunk.options(timeout=CHUNK_TIMEOUT)
        parts = source.memory.split(CHUNK)

        async def read_chunk(number: int) -> None:
            window: RDMABuffer = await chunk.route(name, number, len(parts[number]))
            await window.read_into(parts[number], timeout=CHUNK_TIMEOUT)

        reads: deque[asyncio.Task[None]] = deque()
        try:
            for number in range(len(parts)):
                reads.append(asyncio.create_task(read_chunk(number)))
                # No more than this many reads continue: none after the last chunk.
                most = READS - 1 if number + 1 < len(parts) else 0
                while len(reads) > most:
                    await reads[0]
                    reads.popleft()
                    source.announce(number + 1 - len(reads))
        finally:
            # The memory is released after this: nothing may write into it any more.
            await asyncio.gather(*reads, return_exceptions=True)

    def _open_segment(self, segment: str, resources: ExitStack) -> Tensor:
        """Return the memory of a segment that was written on this host."""
        name = local_name(segment)
        try:
            return resources.enter_context(self.store.segments.reading([name]))[name]
        except FileNotFoundError:
            raise MissingVersion(f"{segment} is no longer on {self.host}") from None

    def _restart_idle_timer(self, segment: str, source: Source) -> None:
        if source.idle_timer is not None:
            source.idle_timer.cancel()
        loop = asyncio.get_running_loop()
        source.idle_timer = loop.call_later(IDLE, lambda: loop.create_task(self._release_source(segment, source)))

    async def _release_source(self, segment: str, source: Source) -> None:
        if self._sources.get(segment) is source:
            del self._sources[segment]
        if source.idle_timer is not None:
            source.idle_timer.cancel()
        windows, source.windows = source.windows, {}
        await asyncio.gather(*(window.drop() for window in windows.values()))
        source.resources.close()


def local_store(store: VersionStore) -> tuple[str, HostVersions]:
    """Return the name of this process's host, and the store in that host's memory; `store` is of the home host."""
    if store.is_local():
        return HOME, HostVersions(store.root, store.keep)
    local = HostVersions(os.environ[STORE], store.keep)
    local.prepare()
    return os.environ[HOST], local


def cache_name(host: str) -> str:
    """Return the name of the service that is a host's weight cache.

    >>> cache_name("10.0.0.2:7070")
    'weights_10_0_0_2_7070'
    """
    return "weights_" + re.sub(r"\W", "_", host)


def whole_name(part: Manifest) -> str:
    """Return SEGMENT/VERSION, the name of a manifest's only segment between caches: later versions may reuse it."""
    (segment,) = part.segments
    return f"{segment}/{part.version}"


def host_of(segment: str) -> str:
    """Return the host in a segment's full name, NAME@HOST, or in the name under which caches send it.

    >>> host_of("segment1@10.0.0.2:7070")
    '10.0.0.2:7070'
    """
    return segment.partition("@")[2].partition("/")[0]


def local_name(segment: str) -> str:
    """Return a segment's name on its host, NAME in NAME@HOST."""
    return segment.partition("@")[0]
