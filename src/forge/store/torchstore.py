"""TorchStore as the place of the bytes, where it installs: versions, checksums and layouts stay ours.

    await torchstore.initialize(num_storage_volumes=2, strategy=torchstore.LocalRankStrategy())
    Trainer.options(procs=2).as_actor(model, store=TorchStore(), ...)

TorchStore 0.1.2 needs torch 2.9 and torchmonarch 0.1.2, which are not ours: this is written against its interface and
not tried with it. Its own overwriting of a key is not atomic, so every key here is written once, a version's contents
list after all that it names.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from .errors import IncompleteVersion, MissingVersion
from .manifest import Manifest
from .parts import Part
from .protocol import Store
from .snapshot import Snapshot


class TorchStore(Store):
    """A `forge.store.Store` over an initialised torchstore. One process group puts a key.

    Args:
        keep: how many of a key's newest versions stay.

    Raises:
        ModuleNotFoundError: torchstore is not installed.
    """

    def __init__(self, keep: int = 2) -> None:
        try:
            self._ts = importlib.import_module("torchstore")
        except ModuleNotFoundError:
            raise ModuleNotFoundError("TorchStore needs the torchstore package: pip install torchstore") from None
        self.keep = keep
        self._puts: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="forge-torchstore", daemon=True).start()

    def __reduce__(self):
        return TorchStore, (self.keep,)

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
        place = f"{key}/put/{self._attempt(key, part)}"
        segment = f"{place}/{part.ranks.rank}.bytes"
        memory = torch.empty(part.size, dtype=torch.uint8)
        manifest = part.write(segment, memory)
        if part.size:
            self._do(self._ts.put(segment, memory))
        self._do(self._ts.put(f"{place}/{part.ranks.rank}.part", manifest.to_json()))
        if part.ranks.rank == 0:
            names = [f"{place}/{rank}.part" for rank in range(part.ranks.world)]
            self._until(lambda: all(map(self._there, names)), f"the other ranks' parts of {key}", timeout)
            parts = [Manifest.from_json(self._do(self._ts.get(name))) for name in names]
            self._do(self._ts.put(f"{place}/version", self._publish(parts)))
        self._until(lambda: self._there(f"{place}/version"), f"rank 0 to publish {key}", timeout)
        return self._do(self._ts.get(f"{place}/version"))

    def _attempt(self, key: str, part: Part) -> str:
        """A name that all ranks of this put know: the group's, and how many puts of this key it has made."""
        self._puts[key] = self._puts.get(key, 0) + 1
        return f"{part.ranks.group}-{self._puts[key]}" if part.ranks.group else uuid4().hex

    def _publish(self, parts: list[Manifest]) -> int:
        key, versions = parts[0].key, self.versions(parts[0].key)
        number = parts[0].version
        number = (versions[-1] if versions else 0) + 1 if number is None else number
        manifest = Manifest.join(number, parts)
        try:
            manifest.check()
        except ValueError as error:
            raise IncompleteVersion(str(error)) from None
        self._do(self._ts.put(f"{key}/digest/{number}/{manifest.digest}", ""))
        self._do(self._ts.put(f"{key}/v/{number}", manifest.to_json()))
        for old in versions[: len(versions) + 1 - self.keep]:
            dropped = self.manifest(key, old)
            for name in [f"{key}/v/{old}", *dropped.segments]:
                self._do(self._ts.delete(name))
        return number

    @contextmanager
    def open(self, key: str, version: int | None = None) -> Iterator[Snapshot]:
        versions = self.versions(key)
        if not versions or (version is not None and version not in versions):
            raise MissingVersion(f"{key} version {version} is not in the store; it holds {versions or 'none'}")
        manifest = self.manifest(key, versions[-1] if version is None else version)
        yield Snapshot(manifest, {name: self._do(self._ts.get(name)) for name in manifest.segments})

    def versions(self, key: str) -> list[int]:
        return sorted(int(name.rpartition("/")[2]) for name in self._do(self._ts.keys(f"{key}/v")))

    def keys(self, prefix: str = "") -> list[str]:
        names = self._do(self._ts.keys())
        return sorted({name.rpartition("/v/")[0] for name in names if "/v/" in name and name.startswith(prefix)})

    def delete(self, key: str) -> None:
        if not self.exists(key):
            raise MissingVersion(f"the store has no {key!r}; it holds {self.keys() or 'nothing'}")
        for name in self._do(self._ts.keys(key)):
            if name.startswith(f"{key}/"):
                self._do(self._ts.delete(name))

    def wait(self, key: str, min_version: int = 0, *, timeout: float) -> int:
        self._until(
            lambda: bool(known := self.versions(key)) and known[-1] >= min_version,
            f"{key} version {min_version}",
            timeout,
        )
        return self.versions(key)[-1]

    def manifest(self, key: str, version: int) -> Manifest:
        name = f"{key}/v/{version}"
        if not self._there(name):
            raise MissingVersion(f"{key} version {version} is not in the store; it holds {self.versions(key)}")
        return Manifest.from_json(self._do(self._ts.get(name)))

    def identities(self, key: str) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for name in self._do(self._ts.keys(f"{key}/digest")):
            version, digest = name.split("/")[-2:]
            found.setdefault(int(version), set()).add(digest)
        return found

    def adopt(self, key: str, identities: Mapping[int, set[str]]) -> None:
        for version, digests in identities.items():
            for digest in digests:
                self._do(self._ts.put(f"{key}/digest/{version}/{digest}", ""))

    def _there(self, name: str) -> bool:
        return self._do(self._ts.exists(name))

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _until(self, done: Callable[[], bool], what: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout:g} s for {what}")
            time.sleep(0.02)
