"""Puts of sharded values that do not wait for the other ranks, as TorchStore's do not."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

from torch import Tensor

from ...system.boxes import is_dtensor
from .transfer import RankPart, flatten
from .versions import VersionStore

log = logging.getLogger(__name__)

_pending: dict[str, DeferredPut] = {}  # the last one of each key, in this process
os.register_at_fork(after_in_child=_pending.clear)  # their threads do not exist there


class DeferredPut:
    """One rank's put of a sharded value, in a thread that waits for the other ranks.

    Args:
        timeout: seconds until the put fails, which is logged.

    Attributes:
        written: ends once this rank's part is in the store, with the version if all ranks have put, or with an error.
        ended: once the version is published or has failed.
    """

    def __init__(self, store: VersionStore, part: RankPart, timeout: float) -> None:
        self.written: Future[int | None] = Future()
        self.ended: Future[None] = Future()
        # A process may end while other ranks are absent.
        Thread(target=self._run, args=(store, part, timeout), name="forge-put", daemon=True).start()

    def _run(self, store: VersionStore, part: RankPart, timeout: float) -> None:
        try:
            version = store.put_part(part, timeout, on_wait=lambda: self.written.set_result(None))
        except FileNotFoundError as error:  # the store was removed, which is in order once the part was written
            if not self.written.done():
                self.written.set_exception(error)
        except Exception as error:
            if self.written.done():
                log.error("rank %d put its part of %s, but %s", part.ranks.rank, part.key, error)
            else:
                self.written.set_exception(error)
        else:
            if not self.written.done():
                self.written.set_result(version)
        finally:
            self.ended.set_result(None)


async def put_deferred(store: VersionStore, part: RankPart, timeout: float) -> int | None:
    """Write a part, and return the version if all ranks have put, else None."""
    put = _pending[part.key] = DeferredPut(store, part, timeout)
    # Shielded: a cancelled caller does not take back what is written.
    return await asyncio.shield(asyncio.wrap_future(put.written))


async def wait_for_put(key: str) -> None:
    """Wait until this process's last put of a key has ended: a process reads what it wrote."""
    put = _pending.pop(key, None)
    if put is not None:
        await asyncio.shield(asyncio.wrap_future(put.ended))


def is_sharded(value: Tensor | Mapping[str, Any]) -> bool:
    """Whether other ranks have parts of a tensor of this value."""
    tensors = flatten(value)[0].values()
    return any(is_dtensor(tensor) and not is_whole(tensor) for tensor in tensors)


def is_whole(tensor: Any) -> bool:
    """Whether this rank has all of a DTensor."""
    return tensor.device_mesh.size() == 1 or all(placement.is_replicate() for placement in tensor.placements)


def whole(value: Any) -> Any:
    """A value with plain tensors in place of DTensors that this rank has all of."""
    if isinstance(value, Mapping):
        return {name: whole(part) for name, part in value.items()}
    return value.to_local() if is_dtensor(value) else value
