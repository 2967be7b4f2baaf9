"""The interface of a weight store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .manifest import Manifest
    from .transfer import OpenVersion


class Store(ABC):
    """Versions of tensors by key: `VersionStore` in shared memory of this host; extensions have others, as for
    several hosts. `VersionStore` documents the methods.

    In the controller, `publishers[key](version)` publishes the weights of that number, if a trainer has them.
    """

    publishers: Mapping[str, Callable[[int], Awaitable[object]]] = MappingProxyType({})

    def get(self, key: str, into: Any = None, version: int | None = None, *, timeout: float | None = None) -> Any:
        """Read a version, the newest by default.

        Args:
            into: a tensor, DTensor or state dict of any layout and dtype, filled in place and returned; of a state
                dict, the names that it has. None returns new, whole tensors.
            timeout: seconds to wait for the version; None does not wait.

        Raises:
            MissingVersion: no such key or version; names the existing ones.
            KeyError: a name in `into` is not in the version.
            ValueError: a shape differs; names the tensor.
            CorruptWeights: values differ from those that were put; names the tensor.
        """
        if timeout is not None:
            self.wait(key, version or 0, timeout=timeout)
        with self.open(key, version) as snapshot:
            return snapshot.fill(into)

    def exists(self, key: str, version: int | None = None) -> bool:
        """Return whether a key has this version, or any."""
        versions = self.versions(key)
        return bool(versions) if version is None else version in versions

    @abstractmethod
    def put(
        self,
        key: str,
        value: Tensor | Mapping[str, object],
        version: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        timeout: float = 300.0,
    ) -> int:
        """Publish a tensor or a state dict, in each rank its shards; the version is complete with the last rank's.
        Return the version. IncompleteVersion: another rank did not write in time."""

    @abstractmethod
    def open(self, key: str, version: int | None = None) -> AbstractContextManager[OpenVersion]:
        """Open a version (None: the newest), readable within the context. MissingVersion: it does not exist."""

    @abstractmethod
    def versions(self, key: str) -> list[int]:
        """Complete versions of a key, ascending."""

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """Return keys that start with `prefix`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove all versions of a key; readers keep what they have open. MissingVersion: the key does not exist."""

    @abstractmethod
    def wait(self, key: str, min_version: int = 0, *, timeout: float) -> int:
        """Return the newest version, once it is at least `min_version`. TimeoutError: it took longer than `timeout`
        seconds."""

    @abstractmethod
    def manifest(self, key: str, version: int) -> Manifest:
        """Return names, shapes and checksums of a version. MissingVersion: neither published nor recently dropped."""

    @abstractmethod
    def identities(self, key: str) -> dict[int, set[str]]:
        """Return the identities under which each version of a key was published."""

    @abstractmethod
    def adopt(self, key: str, identities: Mapping[int, set[str]]) -> None:
        """Add identities of versions that were published before a restart."""
