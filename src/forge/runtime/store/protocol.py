"""The interface of a weight store."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .manifest import Manifest
from .transfer import OpenVersion


class Store(ABC):
    """Versions of tensors by key. `VersionStore` keeps them in shared memory of this host; extensions add other stores.

    Attributes:
        publishers: in the controller, a function by key that has a trainer publish its weights under a version number,
            if its step has that number.
    """

    publishers: Mapping[str, Callable[[int], Awaitable[object]]] = MappingProxyType({})

    def get(self, key: str, into: Any = None, version: int | None = None, *, timeout: float | None = None) -> Any:
        """Return the tensors of a version, each value verified by its checksum.

        Args:
            into: a tensor, DTensor or (nested) state dict of any layout and dtype, which is filled in place and
                returned; a state dict may have only some of the names. None returns new, whole tensors.
            version: its number; None is the newest.
            timeout: seconds to wait for the version; None does not wait.

        Raises:
            MissingVersion: the key or the version does not exist; names the existing ones.
            TimeoutError: the version did not appear within `timeout` seconds.
            KeyError: a name in `into` is not in the version.
            ValueError: a shape differs; names the tensor.
            CorruptWeights: values differ from those that were put; names the tensor.
        """
        if timeout is not None:
            self.wait(key, version or 0, timeout=timeout)
        with self.open(key, version) as snapshot:
            return snapshot.fill(into)

    def exists(self, key: str, version: int | None = None) -> bool:
        """Return whether a key has this version; with None, whether it has any."""
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
        """Publish a tensor or a state dict, and return its version; see `VersionStore.put`.

        With DTensors every rank of the process group calls it, and the version is published once all have written.
        """

    @abstractmethod
    def open(self, key: str, version: int | None = None) -> AbstractContextManager[OpenVersion]:
        """Return a context manager of an open version (None: the newest), which can be read within the block.

        Raises:
            MissingVersion: the key or the version does not exist.
        """

    @abstractmethod
    def versions(self, key: str) -> list[int]:
        """Return the numbers of the published versions of a key, ascending; empty if the key does not exist."""

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix` and have a version, sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove all versions of a key; versions that are open stay readable.

        Raises:
            MissingVersion: the key does not exist.
        """

    @abstractmethod
    def wait(self, key: str, min_version: int = 0, *, timeout: float) -> int:
        """Wait until a key has a version of at least `min_version`, and return the newest one.

        Raises:
            TimeoutError: there was none within `timeout` seconds.
        """

    @abstractmethod
    def manifest(self, key: str, version: int) -> Manifest:
        """Return the names, shapes and checksums of a version's tensors.

        Raises:
            MissingVersion: the version is neither published nor one of the recently dropped ones.
        """

    @abstractmethod
    def identities(self, key: str) -> dict[int, set[str]]:
        """Return the digests under which each version of a key was ever published, by its number.

        A version may have several: after a restart its number may be published again with other weights.
        """

    @abstractmethod
    def adopt(self, key: str, identities: Mapping[int, set[str]]) -> None:
        """Record the digests of weights that an earlier store of this run published, by version number."""
