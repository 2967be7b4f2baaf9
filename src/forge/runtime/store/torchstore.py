"""TorchStore's package as the weight store of a run: `cluster.store: torchstore`.

Values are in the package's storage volume, under the names that its own programs have: version 3 of `policy` is the
state dict `policy/v3`. A version exists once its manifest is there, which is put last. Values are compared with
the manifest's checksums as they are read, as in `VersionStore`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

import torch
from torch import Tensor

from ...system.boxes import full_box, is_dtensor
from .deferred import is_whole
from .errors import IncompleteVersion, MissingVersion, VersionConflict
from .manifest import Manifest, Shard, checksum
from .protocol import Store
from .rendezvous import Rendezvous
from .transfer import OpenVersion, RankPart, flatten
from .versions import MAX_HISTORY

T = TypeVar("T")
# Before manifests of published and of dropped versions, and before identities. Dots separate the parts of a name.
PUBLISHED, DROPPED, IDENTITIES = "forge-published", "forge-dropped", "forge-identities"
NEEDED = ("initialize", "shutdown", "put", "put_batch", "get", "get_batch", "keys", "delete_batch")
REMEDY = "install a checkout of github.com/meta-pytorch/torchstore of June 2026 or later, and pygtrie and portpicker"
TIMEOUT = 300.0  # seconds of one call of the package
# torch's manager of shared memory has a second to answer each process that maps a tensor; on a machine with seven times
# the work that it can do, one of 300 tensors failed.
BUSY_MANAGER = "Shared memory manager connection has timed out"
RETRIES = 10
BATCH = 1 << 27  # bytes of tensors that are fetched at once
# The limit of Monarch's messages that the package sets when it is imported, and then takes over all logging.
FRAME_LENGTH = "HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240"


@cache
def package() -> Any:
    """TorchStore's package.

    Raises:
        ImportError: it is not installed, or does not fit this Monarch; says what to install.
    """
    os.environ.setdefault(*FRAME_LENGTH)
    try:
        module = importlib.import_module("torchstore")
    except Exception as error:  # an old package fails in its own ways
        raise ImportError(f"cluster.store torchstore needs TorchStore's package ({error}): {REMEDY}") from error
    if absent := [name for name in NEEDED if not hasattr(module, name)]:
        raise ImportError(f"the installed TorchStore has no {', '.join(absent)} and does not fit Monarch 0.7: {REMEDY}")
    # A line for each transfer at INFO.
    logging.getLogger("torchstore").setLevel(logging.WARNING)
    return module


class TorchStore(Store):
    """Versions in TorchStore's package. Its methods block, and are called in processes of Monarch's.

    Args:
        name: of the package's store.
        keep: number of a key's newest versions that are kept.
    """

    def __init__(self, name: str | None = None, keep: int = 2) -> None:
        self.name = name or f"forge-{uuid4().hex[:12]}"
        self.keep = keep

    def __reduce__(self):
        return TorchStore, (self.name, self.keep)

    async def __aenter__(self) -> TorchStore:
        """Start the package's volume in this process, the controller."""
        await package().initialize(store_name=self.name)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop it."""
        await package().shutdown(self.name)

    def put(
        self,
        key: str,
        value: Tensor | Mapping[str, object],
        version: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        timeout: float = TIMEOUT,
    ) -> int:
        """Publish a tensor or a state dict as `VersionStore.put` does, of one putting program at a time.

        Raises:
            IncompleteVersion, VersionConflict: as of `VersionStore.put`.
        """
        part = RankPart.of_value(key, value, version, dtype)
        # Equal in all ranks: nothing is published until all have met.
        number = (self.versions(key) or [0])[-1] + 1 if part.version is None else part.version
        rendezvous = Rendezvous(part.ranks, f"{self.name}/{key}/{number}", timeout)
        blocks = [(shard, values) for shard, values in part.blocks if values is not None]
        shards = tuple(located(shard, values) for shard, values in blocks)
        empty = tuple(shard for shard, values in part.blocks if values is None)
        plan = Manifest(key, number, part.single, shards + empty).to_json(), coordinates(value)
        plans = [json.loads(text) for text in rendezvous.gather("plan", json.dumps(plan))]
        manifest = Manifest.join(number, [Manifest.from_json(text) for text, _ in plans])
        # Ranks of equal meshes have the same parts, which the package must not be given twice.
        earlier = [places for _, places in plans[: part.ranks.rank]]
        names = {shard.name for shard in shards if shard.name not in coordinates(value)}
        names |= {
            name for name, place in coordinates(value).items() if all(place != places.get(name) for places in earlier)
        }
        # Before anything is written: a conflict must not touch the values of the published version.
        if rendezvous.is_first and not rendezvous.failed(lambda: self._check(manifest)):
            rendezvous.broadcast("decision", "published" if number in self.versions(key) else "new")
        if rendezvous.receive("decision") == "published":
            return number
        rendezvous.failed(lambda: self._write(value, manifest, names, dtype))
        rendezvous.gather("written", "")
        if rendezvous.is_first and not rendezvous.failed(lambda: self._publish(manifest)):
            rendezvous.broadcast("outcome", "")
        rendezvous.receive("outcome")
        return number

    @contextmanager
    def open(self, key: str, version: int | None = None) -> Iterator[OpenVersion]:
        """Open a version. Its blocks are fetched as they are read; MissingVersion if it is dropped meanwhile."""
        versions = self.versions(key)
        number = versions[-1] if version is None and versions else version
        text = self._object(f"{PUBLISHED}.{escaped(key)}.{number}")
        if text is None:
            has = f"it holds {versions}" if versions else "it does not have the key"
            raise MissingVersion(f"{key} version {number} is not in the store: {has}")
        manifest = Manifest.from_json(text)
        yield OpenVersion(manifest, Blocks(self, manifest))

    def versions(self, key: str) -> list[int]:
        """The published versions, ascending."""
        return self._numbers(PUBLISHED, key)

    def keys(self, prefix: str = "") -> list[str]:
        """The keys that have a version, sorted."""
        manifests = self._call("keys", PUBLISHED)
        keys = {Manifest.from_json(str(self._object(name))).key for name in manifests}
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove a key. MissingVersion: it does not exist."""
        versions = self.versions(key)
        if not versions:
            raise MissingVersion(f"the store has no {key!r}")
        for version in versions:
            self._drop(key, version)
        dropped = [f"{DROPPED}.{escaped(key)}.{version}" for version in self._numbers(DROPPED, key)]
        self._call("delete_batch", [*dropped, f"{IDENTITIES}.{escaped(key)}"])

    def wait(self, key: str, min_version: int = 0, *, timeout: float) -> int:
        """Wait for a version of at least `min_version`; return the newest. TimeoutError: names the existing ones."""
        deadline = time.monotonic() + timeout
        while not (versions := self.versions(key)) or versions[-1] < min_version:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited {timeout:g} s for {key} version {min_version}; the store has {versions or 'none'}"
                )
            time.sleep(0.05)
        return versions[-1]

    def manifest(self, key: str, version: int) -> Manifest:
        """The manifest of a version, also of a recently dropped one. MissingVersion: it is neither."""
        for kind in (PUBLISHED, DROPPED):
            if text := self._object(f"{kind}.{escaped(key)}.{version}"):
                return Manifest.from_json(text)
        raise MissingVersion(f"{key} version {version} is not in the store; it holds {self.versions(key)}")

    def identities(self, key: str) -> dict[int, set[str]]:
        """The digests under which each version was ever published."""
        return self._object(f"{IDENTITIES}.{escaped(key)}") or {}

    def adopt(self, key: str, identities: Mapping[int, set[str]]) -> None:
        """Add an earlier store's digests of published versions."""
        merged = self.identities(key)
        for version, digests in identities.items():
            merged[version] = merged.get(version, set()) | digests
        self._call("put", f"{IDENTITIES}.{escaped(key)}", merged)

    def fetch(self, key: str, shards: Sequence[Shard]) -> list[Tensor]:
        """Blocks of tensors of a state dict: one that is not whole, or whole ones. MissingVersion: it was dropped."""
        types = importlib.import_module("torchstore.transport.types")
        names = [f"{key}/{shard.name}" for shard in shards]
        first = shards[0]
        try:
            if is_full(first):
                values = self._call("get_batch", names)
                return [values[name] for name in names]
            block = types.TensorSlice(first.box.offset, (), first.shape, first.box.size, ())
            return [self._call("get", names[0], None, block)]
        except KeyError as error:
            raise MissingVersion(f"{key} was dropped while it was read: {error}") from None

    def _check(self, manifest: Manifest) -> None:
        """VersionConflict or IncompleteVersion unless the version may be published, or is."""
        versions = self.versions(manifest.key)
        number = manifest.version
        try:
            manifest.check()
        except ValueError as error:
            raise IncompleteVersion(str(error)) from None
        if number in versions:
            published = self.manifest(manifest.key, number)
            if published.digest != manifest.digest:
                tensor = published.first_difference(manifest)
                differs = "in another layout" if tensor is None else f"with other values of tensor {tensor!r}"
                raise VersionConflict(f"{manifest.key} version {number} was published before {differs}")
        elif versions and number is not None and number < versions[-1]:
            raise VersionConflict(f"{manifest.key} version {number} is older than the newest, {versions[-1]}")

    def _write(self, value: object, manifest: Manifest, names: set[str], dtype: torch.dtype | None) -> None:
        """Put this rank's parts of tensors."""
        entries: dict[str, Tensor] = {}
        for name, tensor in flatten(value)[0].items():
            values = tensor.detach()
            if is_dtensor(values) and is_whole(values):
                values = values.to_local()
            if values.numel() and name in names:
                converts = dtype is not None and values.is_floating_point()
                entries[entry(manifest, name)] = values.to(dtype) if converts else values
        if entries:
            start_memory_manager()
            self._call("put_batch", entries)

    def _publish(self, manifest: Manifest) -> None:
        """Make a version exist, whose tensors are there, and drop the oldest."""
        key, number = manifest.key, manifest.version
        assert number is not None
        # Before the version exists: every reader of it must find its identity.
        self.adopt(key, {number: {manifest.digest}})
        # With this, the package's own get_state_dict reads a version, without tensors that have no elements.
        mapping = {shard.name: (shard.name,) for shard in manifest.shards if shard.segment}
        self._call("put", entry(manifest, "MAPPING"), mapping)
        self._call("put", f"{PUBLISHED}.{escaped(key)}.{number}", manifest.to_json())
        for version in self.versions(key)[: -self.keep]:
            self._call("put", f"{DROPPED}.{escaped(key)}.{version}", self.manifest(key, version).to_json())
            self._drop(key, version)
        oldest = self._numbers(DROPPED, key)[:-MAX_HISTORY]
        self._call("delete_batch", [f"{DROPPED}.{escaped(key)}.{version}" for version in oldest])

    def _drop(self, key: str, version: int) -> None:
        """Remove a version: first its manifest, so that no reader opens a part of it."""
        manifest = self.manifest(key, version)
        # A reader that has opened it misses the tensors that it has yet to fetch, and says so.
        self._call("delete_batch", [f"{PUBLISHED}.{escaped(key)}.{version}"])
        self._call("delete_batch", [entry(manifest, name) for name in (*manifest.by_name, "MAPPING")])

    def _numbers(self, kind: str, key: str) -> list[int]:
        names: list[str] = self._call("keys", f"{kind}.{escaped(key)}")
        return sorted(int(name.rpartition(".")[2]) for name in names)

    def _object(self, name: str) -> Any:
        """A value, or None if there is none."""
        try:
            return self._call("get", name)
        except KeyError:
            return None

    def _call(self, function: str, *args: Any) -> Any:
        """Call a function of the package, from any thread; every one may be repeated."""
        # A repeated call puts or reads the same values, and the package ignores absent keys in a batch that is deleted.
        for _ in range(RETRIES):
            try:
                return wait_for(getattr(package(), function)(*args, store_name=self.name))
            except RuntimeError as error:
                if BUSY_MANAGER not in str(error):
                    raise
        return wait_for(getattr(package(), function)(*args, store_name=self.name))


class Blocks(Mapping[str, Tensor]):
    """The bytes of a version's blocks by segment, each fetched when it is asked for.

    Whole tensors come with those that follow, as they are mostly read in order: a call of the package takes some
    milliseconds, whatever the size.
    """

    def __init__(self, store: TorchStore, manifest: Manifest) -> None:
        self._store = store
        self._key = f"{manifest.key}/v{manifest.version}"
        self._shards = {shard.segment: shard for shard in manifest.shards if shard.segment}
        self._order = list(self._shards)
        self._fetched: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def __getitem__(self, segment: str) -> Tensor:
        with self._lock:
            if segment not in self._fetched:
                batch = self._batch(segment)
                values = self._store.fetch(self._key, [self._shards[name] for name in batch])
                self._fetched = dict(zip(batch, values, strict=True))
            # Kept no longer than until it is read: a version may be larger than what is free.
            block = self._fetched.pop(segment)
        return block.cpu().contiguous().reshape(-1).view(torch.uint8)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def _batch(self, segment: str) -> list[str]:
        """A segment, and those that are fetched with it."""
        batch = [segment]
        size = 0
        for name in self._order[self._order.index(segment) :]:
            shard = self._shards[name]
            size += shard.box.numel * getattr(torch, shard.dtype).itemsize
            if size > BATCH or not is_full(shard) or not is_full(self._shards[segment]):
                break
            if name != segment:
                batch.append(name)
        return batch


def is_full(shard: Shard) -> bool:
    """Whether a block is a whole tensor."""
    return shard.box == full_box(shard.shape)


@cache
def start_memory_manager() -> None:
    """Start torch's manager of shared memory, which the package uses, with its socket outside a run's private folder.

    It ends after the last process of the run, when that folder is gone, and complains about it.
    """
    private = os.environ.get("TMPDIR", "")
    if Path(private).name.startswith("forge-run-"):
        os.environ["TMPDIR"] = str(Path(private).parent)
    try:
        torch.UntypedStorage(1)._share_filename_cpu_()
    finally:
        if private:
            os.environ["TMPDIR"] = private


def located(shard: Shard, values: Tensor) -> Shard:
    """A block that is its own segment, with its checksum."""
    dtype: torch.dtype = getattr(torch, shard.dtype)
    bytes_hash = checksum(values.to(dtype).cpu().contiguous())
    return replace(shard, segment=f"{shard.name}{shard.box}", start=0, checksum=bytes_hash)


def coordinates(value: object) -> dict[str, list[int]]:
    """Where this rank is in the meshes of the sharded tensors of a value, by name."""
    tensors = flatten(value)[0].items()
    sharded = {name: tensor for name, tensor in tensors if is_dtensor(tensor) and not is_whole(tensor)}
    return {name: list(tensor.device_mesh.get_coordinate() or ()) for name, tensor in sharded.items()}


def entry(manifest: Manifest, name: str) -> str:
    """The name of a tensor of a version in the package: that of an entry of its state dict."""
    return f"{manifest.key}/v{manifest.version}/{name}"


def escaped(key: str) -> str:
    """A key as one part of a name."""
    return quote(key, safe="").replace(".", "%2E")


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of the package's. TimeoutError: it took longer than `TIMEOUT`."""
    return asyncio.run_coroutine_threadsafe(work, loop()).result(TIMEOUT)


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The event loop of the package's calls in this process."""
    running = asyncio.new_event_loop()
    threading.Thread(target=running.run_forever, name="forge-torchstore", daemon=True).start()
    return running


os.register_at_fork(after_in_child=loop.cache_clear)  # its thread does not exist there
