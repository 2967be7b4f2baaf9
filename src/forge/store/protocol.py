"""What components need of a store, wherever its bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from .manifest import Manifest
from .snapshot import Snapshot


class Store(Protocol):
    """Versions of tensors by key. `VersionStore` holds them in the shared memory of this host, `RemoteStore` reaches
    those of another host; see `VersionStore` for what each method does."""

    def put(
        self,
        key: str,
        value: Tensor | Mapping[str, Any],
        version: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        timeout: float = 300.0,
    ) -> int: ...

    def get(self, key: str, into: Any = None, version: int | None = None, *, timeout: float | None = None) -> Any: ...

    def open(self, key: str, version: int | None = None) -> AbstractContextManager[Snapshot]: ...

    def versions(self, key: str) -> list[int]: ...

    def keys(self, prefix: str = "") -> list[str]: ...

    def exists(self, key: str, version: int | None = None) -> bool: ...

    def delete(self, key: str) -> None: ...

    def wait(self, key: str, min_version: int = 0, *, timeout: float) -> int: ...

    def manifest(self, key: str, version: int) -> Manifest: ...

    def identities(self, key: str) -> dict[int, set[str]]: ...

    def adopt(self, key: str, identities: Mapping[int, set[str]]) -> None: ...
