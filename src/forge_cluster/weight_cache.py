"""Weights between hosts: each host has a store in its shared memory, and a cache that copies versions into it.

A version stays in the memory of the hosts that wrote it; the home store, on the controller's host, has its manifest. To
read a version a process asks its host's cache, which copies it once for all processes there. Caches form a tree of two
branches, in the order in which they ask: the first one reads from the writers, each other one from the cache above it,
through RDMA windows (by InfiniBand if the host has it, otherwise by TCP). So a version leaves its writers once.
"""

import asyncio
import logging
import os
import re
import time
import warnings
from contextlib import ExitStack
from typing import Any

from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

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


class HostVersions(VersionStore):
    """A `VersionStore` that also keeps segments of versions whose manifest is in another host's store."""

    def keep_part(self, part: Manifest, name: str) -> None:
        """Keep this host's segments of a version that is published on another host: the part of a rank, or a copy.

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
        """Return the manifest that was passed to `keep_part` under this name; None if it is no longer kept."""
        path = self._key_folder(key) / "parts" / name / f"{version}.json"
        try:
            return Manifest.from_json(path.read_text(errors="replace"))
        except FileNotFoundError:
            return None


log = logging.getLogger(f"forge.{__name__}")

START_TIMEOUT = 60  # seconds of a transfer before its first byte must have arrived
SLOWEST = 10 << 20  # bytes a second of the slowest network that is waited for
RETRY_DELAY = 2.0  # seconds between attempts to read a version whose writers are lost
KEPT_ORDERS = 8  # number of last versions of which the home cache keeps who asked for them
HOME = "home"  # name of the controller's host
COPY = "copy"  # name of copies in `HostVersions.keep_part`

Version = tuple[str, int]  # its key and number


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
            raise ValueError(f"the weight cache of {self.store.root} must run on the host of that store")
        self._fetching: dict[Version, asyncio.Task[str]] = {}
        self._orders: dict[Version, list[str]] = {}  # at home: the hosts that asked for a version
        self._copies: dict[Version, dict[str, str]] = {}  # names of a version's segments here, by NAME@HOST
        self._windows: dict[Version, dict[str, tuple[RDMABuffer, ExitStack]]] = {}  # by NAME@HOST

    @endpoint
    async def link(self, home: RemoteService) -> None:
        """Pass the home cache its own service handle, with which it finds the other caches."""
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
        manifest = (await asyncio.to_thread(self.store.manifest, key, version)).on_host(HOME).to_json()
        for outdated in [asked for asked in self._orders if asked[0] == key and asked[1] < version - KEPT_ORDERS]:
            del self._orders[outdated]

        # A host that asks again keeps its place in the tree.
        order = self._orders.setdefault((key, version), [])
        if host not in order:
            order.append(host)
        # The parent of node n of a binary tree is (n - 1) // 2.
        node = order.index(host)
        while node > 0:
            node = (node - 1) // 2
            if order[node] not in avoid:
                return manifest, order[node]
        return manifest, None

    @endpoint
    async def window(self, key: str, version: int, segment: str, size: int, timeout: float) -> RDMABuffer:
        """Return a window to the first `size` bytes of a version's segment, which was written here or is copied first.

        Args:
            segment: NAME@HOST.
            timeout: seconds for the copy.

        Raises:
            MissingVersion, TimeoutError: it is no longer here, or its copy did not arrive in time.
        """
        if host_of(segment) != self.host and (key, version) not in self._copies:
            await self.fetch(key, version, timeout)
        await self._release_before(key, version)
        windows = self._windows.setdefault((key, version), {})
        if segment not in windows:
            name = self._copies.get((key, version), {}).get(segment, local_name(segment))
            lock = ExitStack()
            try:
                memory = lock.enter_context(self.store.segments.reading([name]))[name]
            except FileNotFoundError:
                raise MissingVersion(f"{segment} of {key} version {version} is no longer on {self.host}") from None
            # The memory must not be freed before `drop` of the window has ended.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RDMATcpFallbackWarning)
                windows[segment] = RDMABuffer(memory[:size]), lock
        return windows[segment][0]

    @endpoint
    async def fetch(self, key: str, version: int, timeout: float) -> str:
        """Copy a version into this host's store unless it is there; return the manifest of the copy as JSON.

        Raises:
            MissingVersion, TimeoutError: no host has it any more, or it did not arrive within `timeout` seconds.
        """
        if (key, version) not in self._fetching:
            task = self._fetching[key, version] = asyncio.create_task(
                self._fetch_version(key, version, time.monotonic() + timeout)
            )
            task.add_done_callback(lambda _: self._fetching.pop((key, version)))
        # Shielded: a caller that stops waiting must not end the transfer for the others.
        return await asyncio.wait_for(asyncio.shield(self._fetching[key, version]), timeout)

    async def _fetch_version(self, key: str, version: int, deadline: float) -> str:
        avoid: list[str] = []
        while True:
            text, parent = await self.home.locate.route(key, version, self.host, avoid)
            manifest = Manifest.from_json(text)
            try:
                return await self._copy_version(manifest, version, parent, deadline)
            except (KeyError, RuntimeError, TimeoutError) as error:  # the version, a cache, or a host is lost
                source = parent or ", ".join(sorted(set(map(host_of, manifest.segments))))
                if parent is None and time.monotonic() > deadline - RETRY_DELAY:
                    raise MissingVersion(f"{key} version {version} could not be read from {source}: {error}") from error
                log.warning("%s version %d could not be read from %s: %s", key, version, source, error)
                if parent is not None:
                    avoid.append(parent)
                else:  # the lost trainer is replaced, and publishes the version again
                    await asyncio.sleep(RETRY_DELAY)

    async def _copy_version(self, manifest: Manifest, version: int, parent: str | None, deadline: float) -> str:
        """Copy a version's segments on other hosts into this host's store; return the manifest of the copy as JSON."""
        start = time.monotonic()
        names = {segment: local_name(segment) for segment in manifest.segments}
        foreign = [segment for segment in sorted(names) if host_of(segment) != self.host]
        with ExitStack() as writing:
            for segment in foreign:
                size = manifest.extent(segment)
                names[segment], memory = await asyncio.to_thread(
                    writing.enter_context, self.store.segments.writing(size)
                )
                # A cache above may be copying too; half of the time is left for another source.
                timeout = max(1.0, deadline - time.monotonic()) / (1 if parent is None else 2)
                ask = self.home.named(cache_name(parent or host_of(segment))).window.options(timeout=timeout)
                window: RDMABuffer = await ask.route(manifest.key, version, segment, size, timeout)
                await window.read_into(memory, timeout=START_TIMEOUT + size // SLOWEST)
            copied = manifest.renamed(names)
            await asyncio.to_thread(self.store.keep_part, copied, COPY)

        self._copies[manifest.key, version] = names
        await self._release_before(manifest.key, version)
        if foreign:
            record_metric("weight_sync/bytes", sum(map(manifest.extent, foreign)), Reduce.SUM)
            record_metric("weight_sync/seconds", time.monotonic() - start, Reduce.MEAN)
        return copied.to_json()

    async def _release_before(self, key: str, version: int) -> None:
        """Close the windows to versions before the one that precedes this one, so that their memory is reused."""
        for old in [other for other in self._copies if other[0] == key and other[1] < version - 1]:
            del self._copies[old]
        # Another call may close them too while this one waits.
        for old in [other for other in self._windows if other[0] == key and other[1] < version - 1]:
            windows = self._windows.pop(old, {}).values()
            await asyncio.gather(*(window.drop() for window, _ in windows))
            for _, lock in windows:
                lock.close()


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


def host_of(segment: str) -> str:
    """Return the host in a segment's full name, NAME@HOST.

    >>> host_of("segment1@10.0.0.2:7070")
    '10.0.0.2:7070'
    """
    return segment.partition("@")[2]


def local_name(segment: str) -> str:
    """Return a segment's name on its host, NAME in NAME@HOST."""
    return segment.partition("@")[0]
