"""Memory that other processes read and write directly: by RDMA, or by TCP without such hardware."""

from __future__ import annotations

import math
import warnings

from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning
from torch import Tensor

from forge.runtime.controller import _monarch  # noqa: F401  (Monarch needs its settings first)


class Window:
    """Bytes of this process, uint8 [size], that every process which receives this object may read and write. Create and
    use it within an endpoint.

    The memory stays accessible until `close` and must not be freed before.
    """

    def __init__(self, memory: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RDMATcpFallbackWarning)
            self._buffer = RDMABuffer(memory)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._buffer.size()

    async def read_into(self, memory: Tensor, timeout: float) -> None:
        """Copy all bytes from the owner's memory into `memory`, at least as large."""
        await self._buffer.read_into(memory, timeout=math.ceil(timeout))

    async def write_from(self, memory: Tensor, timeout: float) -> None:
        """Copy `memory` into the owner's memory, at least as large."""
        await self._buffer.write_from(memory, timeout=math.ceil(timeout))

    async def close(self) -> None:
        """Withdraw the access of other processes."""
        await self._buffer.drop()
