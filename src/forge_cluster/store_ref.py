"""The weight store of a run on several hosts, see `forge.actors.publication.share_store`."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from forge.runtime.controller import runtime
from forge.runtime.controller.remote_service import RemoteService
from forge.runtime.store import MissingVersion, Store, VersionStore
from forge.runtime.store.manifest import Manifest
from forge.runtime.store.transfer import OpenVersion, RankPart, publish_together

from .pool import Pool
from .weight_cache import COPY, HOME, HostVersions, WeightCache, cache_name, host_of, local_store

T = TypeVar("T")
GRACE = 15.0  # seconds that a call may take longer than the transfer that it waits for


class StoreRef:
    """A picklable reference to the store of a run on several hosts, which components are given.

    Args:
        store: the store of the home host.
        home: a handle to the home cache.
    """

    def __init__(self, store: VersionStore, home: RemoteService) -> None:
        self.store, self._home = store, home

    def connect(self) -> Store:
        """Return the store for the process that calls this, on any host."""
        host, local = local_store(self.store)
        return HostStore(host, local, self._home, self._home.named(cache_name(host)))


async def share_across_hosts(store: VersionStore, pool: Pool) -> StoreRef:
    """Start a weight cache on every host of a pool, also on those that join later; return a reference to the store."""
    home = await WeightCache.options(mesh_name=cache_name(HOME)).as_actor(store)
    await home.link.call_one(home)

    async def start_cache(host: str) -> None:
        if (cache := runtime().services.get(cache_name(host))) is None:
            await WeightCache.options(mesh_name=cache_name(host), host=host).as_actor(store, home)
        else:  # the host came back: its cache waits for it, or was given up
            await cache.scale(1)

    # Trainers publish the newest versions again that were on a lost host: others may be waiting for them.
    async def publish_again(host: str) -> None:
        for key in store.keys():  # noqa: SIM118 - a store is not a mapping
            newest = store.versions(key)[-1]
            hosts = {host_of(segment) for segment in store.manifest(key, newest).segments}
            if key in store.publishers and host in hosts:
                await store.publishers[key](newest)

    pool.on_lost.append(publish_again)
    pool.on_up(start_cache)
    return StoreRef(store, cast(RemoteService, home))  # a service is a RemoteService once it is unpickled


class HostStore(Store):
    """The store of a run on several hosts, for a process of one of them.

    Its methods block: call them from a thread, within an endpoint.

    Args:
        host: name of the process's host.
        local: the store in this host's memory.
        home: the weight cache of the home host.
        cache: the weight cache of this host.
        timeout: seconds for the transfer of a version.
    """

    def __init__(
        self, host: str, local: HostVersions, home: RemoteService, cache: RemoteService, timeout: float = 300.0
    ) -> None:
        self.host, self.local = host, local
        self._home, self._cache, self._timeout = home, cache, timeout
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
        """Publish a version and return its number, see `Store.put`; on a host other than the home host the weights stay
        in its memory, and only their manifests are sent."""
        if self.host == HOME:
            return self.local.put(key, value, version, dtype=dtype, timeout=timeout)
        part = RankPart.of_value(key, value, version, dtype)
        with self.local.segments.writing(max(part.size, 1)) as (name, memory):
            written = part.write(name, memory)

            def publish_parts(parts: list[Manifest]) -> int:
                return self._wait_for(self._home.publish.route([part.to_json() for part in parts]))

            write_manifest = partial(written.on_host, self.host)
            if part.ranks.world == 1:
                number = publish_parts([write_manifest()])
            else:
                number = publish_together(part, write_manifest, publish_parts, timeout)

            # Before the segment is unlocked, after which other processes of this host may reuse it.
            self.local.keep_part(replace(written, version=number), f"rank{part.ranks.rank}")

        return number

    @contextmanager
    def open(self, key: str, version: int | None = None) -> Iterator[OpenVersion]:
        """Yield a version in this host's memory, to which it is copied unless it is there; None for the newest.

        Raises:
            MissingVersion: it is no longer kept.
        """
        if version is None:
            versions = self.versions(key)
            version = versions[-1] if versions else 0
        manifest = self.local.part(key, version, COPY)

        # A copy may have been reused since it was made: then it is fetched once more.
        for is_retry in (False, True):
            if manifest is None or is_retry:
                fetched = self._cache.fetch.options(timeout=self._timeout + GRACE).route(key, version, self._timeout)
                manifest = Manifest.from_json(self._wait_for(fetched))
            try:
                with self.local.segments.reading(manifest.segments) as memory:
                    yield OpenVersion(manifest, memory)
                    return
            except FileNotFoundError:
                if is_retry:
                    raise MissingVersion(
                        f"{key} version {version} was deleted on {self.host} while it was opened: read a newer version"
                    ) from None

    def _ask_home(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.host == HOME:
            return getattr(self.local, method)(*args, **kwargs)
        return self._wait_for(self._home.ask.route(method, *args, **kwargs))

    # The home store answers these calls; `Store` describes them.
    versions: Any = partialmethod(_ask_home, "versions")
    keys: Any = partialmethod(_ask_home, "keys")
    delete: Any = partialmethod(_ask_home, "delete")
    wait: Any = partialmethod(_ask_home, "wait")
    manifest: Any = partialmethod(_ask_home, "manifest")
    identities: Any = partialmethod(_ask_home, "identities")
    adopt: Any = partialmethod(_ask_home, "adopt")

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        # Without a timeout: the calls to caches have their own.
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
