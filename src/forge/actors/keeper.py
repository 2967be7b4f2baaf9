"""The weight store for processes of other hosts: what they read and write goes through memory windows (RDMA, or TCP).

    keeper = await Keeper.as_actor(store)           # on the store's own host
    Generator.options(hosts=2).as_service(..., store=Reach(store, keeper))

Each process takes the way that is open to it: shared memory where the store is on its own host, the keeper elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from ..controller import ForgeActor, Service, endpoint
from ..controller.rdma import Window
from ..store import CorruptWeights, Store, VersionStore
from ..store.manifest import Manifest, checksum
from ..store.transfer import Part, Ranks, Snapshot

# Seconds beyond a transfer's own limit after which its memory is taken back.
GRACE = 60.0
# Buffers that a process keeps for the next transfers.
SPARE = 8


class LeaseLost(RuntimeError):
    """Memory of the store was taken back from a reader or writer who took too long, or the keeper was replaced."""


class Keeper(ForgeActor):
    """Lives on the store's host and acts there for others.

    Args:
        store: of this host.
    """

    def __init__(self, store: VersionStore) -> None:
        self.store = store
        self._leases: dict[str, Lease] = {}

    def setup(self) -> None:
        if not self.store.is_here():
            raise ValueError(f"the keeper of {self.store.root} must run on the host where it is")

    @endpoint
    async def open(self, key: str, version: int | None, limit: float) -> tuple[str, str, dict[str, Window]]:
        """Hold a version for a reader, for `limit` seconds: a lease, the contents list, a window to each segment."""
        stack = ExitStack()
        snapshot = await asyncio.to_thread(stack.enter_context, self.store.open(key, version))
        windows = {name: Window(memory) for name, memory in snapshot.memory.items()}
        return self._lease(Lease(stack, windows, {}), limit), snapshot.manifest.to_json(), windows

    @endpoint
    async def reserve(self, size: int, limit: float) -> tuple[str, str, Window]:
        """Memory of the store for a writer, for `limit` seconds: a lease, the segment's name, and a window to it."""
        stack = ExitStack()
        name, memory = await asyncio.to_thread(stack.enter_context, self.store.segments.writing(max(size, 1)))
        window = Window(memory)
        return self._lease(Lease(stack, {name: window}, {name: memory}), limit), name, window

    @endpoint
    async def publish(self, lease: str, part: str, ranks: Ranks, timeout: float) -> int:
        """Publish what was written into reserved memory, see `VersionStore.put`; ends the lease.

        Raises:
            CorruptWeights: it is not what the writer had.
            LeaseLost: the memory was taken back before.
        """
        held = self._leases.pop(lease, None)
        if held is None:
            raise LeaseLost("the memory of this put was reclaimed: raise the timeout of the put")

        def publish() -> int:
            # In the thread to its end, even if its caller has stopped waiting: the memory is held as long.
            with held.stack:
                manifest = Manifest.from_json(part)
                for shard in manifest.shards:
                    if shard.segment and checksum(shard.view(held.memory[shard.segment])) != shard.checksum:
                        text = f"{manifest.key}: tensor {shard.name!r} {shard.box} was damaged on its way"
                        raise CorruptWeights(text)
                return self.store.publish(manifest, ranks, timeout)

        await held.shut()
        return await asyncio.to_thread(publish)

    @endpoint
    async def release(self, lease: str) -> None:
        """These windows are no longer in use."""
        await self._release(lease)

    @endpoint
    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the store answers to `method`."""
        return await asyncio.to_thread(getattr(self.store, method), *args, **kwargs)

    def _lease(self, lease: Lease, limit: float) -> str:
        name, loop = uuid4().hex, asyncio.get_running_loop()
        lease.timer = loop.call_later(limit + GRACE, lambda: loop.create_task(self._release(name)))
        self._leases[name] = lease
        return name

    async def _release(self, name: str) -> None:
        if name in self._leases:
            lease = self._leases.pop(name)
            await lease.shut()
            lease.stack.close()


@dataclass
class Lease:
    """Memory of the store in the hands of another host: what holds it, and the windows to it."""

    stack: ExitStack
    windows: dict[str, Window]
    memory: dict[str, Tensor]
    timer: asyncio.TimerHandle | None = None

    async def shut(self) -> None:
        """Close the windows."""
        if self.timer is not None:
            self.timer.cancel()
        await asyncio.gather(*(window.close() for window in self.windows.values()))


class Reach:
    """A store as it is handed to components: in each process `connect` gives the way to it that is open there.

    Args:
        store: on the host where it was made.
        keeper: its keeper, for processes of other hosts.
        remote: go through the keeper on the store's own host as well.
    """

    def __init__(self, store: VersionStore, keeper: Service, *, remote: bool = False) -> None:
        self.store, self._keeper, self._remote = store, keeper, remote

    def connect(self) -> Store:
        """The way to the store that is open to this process."""
        if self.store.is_here() and not self._remote:
            return self.store
        return RemoteStore(self._keeper)


def connect(store: Store | Reach | None) -> Store | None:
    """What a component was given as a store, as it can use it; to be called in its process."""
    return store.connect() if isinstance(store, Reach) else store


def home(store: Store | Reach | None) -> Store | None:
    """What a component was given as a store, in the controller: the store itself."""
    return store.store if isinstance(store, Reach) else store


class RemoteStore(Store):
    """The store of another host. Its methods block: call them from a thread, within an endpoint.

    Args:
        keeper: the service that acts for this process on that host.
        timeout: seconds for one transfer.
    """

    def __init__(self, keeper: Any, timeout: float = 300.0) -> None:
        self._keeper, self._timeout = keeper, timeout
        self._spare: list[Tensor] = []  # buffers to be used again
        self._choosing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="forge-remote-store", daemon=True).start()

    def put(
        self,
        key: str,
        value: Tensor | Mapping[str, Any],
        version: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        timeout: float = 300.0,
    ) -> int:
        part = Part.of(key, value, version, dtype)
        with self._buffer(part.size) as memory:

            async def send() -> int:
                lease, segment, window = await self._keeper.reserve.route(part.size, timeout)
                try:
                    manifest = await asyncio.to_thread(part.write, segment, memory)
                    if part.size:
                        await window.write_from(memory, timeout)
                    return await self._keeper.publish.route(lease, manifest.to_json(), part.ranks, timeout)
                finally:
                    await self._keeper.release.route(lease)

            return self._wait(send())

    @contextmanager
    def open(self, key: str, version: int | None = None) -> Iterator[Snapshot]:
        with ExitStack() as buffers:

            async def fetch() -> Snapshot:
                lease, manifest, windows = await self._keeper.open.route(key, version, self._timeout)
                try:
                    memory = {}
                    for name, window in windows.items():
                        memory[name] = buffers.enter_context(self._buffer(window.size))
                        await window.read_into(memory[name], self._timeout)
                finally:
                    await self._keeper.release.route(lease)
                return Snapshot(Manifest.from_json(manifest), memory)

            yield self._wait(fetch())

    def versions(self, key: str) -> list[int]:
        return self._ask("versions", key)

    def keys(self, prefix: str = "") -> list[str]:
        return self._ask("keys", prefix)

    def delete(self, key: str) -> None:
        return self._ask("delete", key)

    def wait(self, key: str, min_version: int = 0, *, timeout: float) -> int:
        return self._ask("wait", key, min_version, timeout=timeout)

    def manifest(self, key: str, version: int) -> Manifest:
        return self._ask("manifest", key, version)

    def identities(self, key: str) -> dict[int, set[str]]:
        return self._ask("identities", key)

    def adopt(self, key: str, identities: Mapping[int, set[str]]) -> None:
        return self._ask("adopt", key, identities)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._wait(self._keeper.ask.route(method, *args, **kwargs))

    def _wait(self, work: Any) -> Any:
        # The keeper's calls have limits of their own.
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @contextmanager
    def _buffer(self, size: int) -> Iterator[Tensor]:
        """Memory for one transfer, used before if there is some: the first touch is what costs."""
        with self._choosing:
            fits = [spare for spare in self._spare if len(spare) == size]
            memory = fits[0] if fits else torch.empty(size, dtype=torch.uint8)
            self._spare = [spare for spare in self._spare if spare is not memory]
        yield memory
        # Not after an error: a transfer that was given up may still write to it.
        with self._choosing:
            self._spare = [*self._spare, memory][-SPARE:]
