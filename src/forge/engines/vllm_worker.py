"""What runs inside vLLM's worker processes: loading weights that were handed over, and giving memory back on a CPU.

vLLM mixes `WorkerExtension` into its worker class. Importing this module in a worker ties the worker to the process
that owns the engine: vLLM's processes would outlive one that is killed, and hold its memory. Nothing else imports it.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from typing import Any

from torch import Tensor

from forge.engines.handover import Place, read_handover
from forge.engines.vllm_args import OWNER


def _die_with(owner: int) -> None:
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:  # it is gone already
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        select.select([handle], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="forge-owner", daemon=True).start()


class WorkerExtension:
    """Methods that `VLLMEngine` calls through `collective_rpc`."""

    model_runner: Any

    def forge_load(self, path: str, places: list[Place], dtype: str) -> None:
        """Put the tensors of a `Handover` in the place of the model's own."""
        named = [(name, tuple(shape), start) for name, shape, start in places]
        self.reload_weights(weights_iterator=read_handover(path, named, dtype))  # type: ignore[attr-defined]

    def forge_release(self) -> None:
        """Give back the key-value cache, on a CPU, where vLLM's sleep mode does nothing."""
        # Layers are views of few storages, or of one.
        storages = {storage.data_ptr(): storage for storage in map(_storage, self.model_runner.kv_caches)}
        self.forge_given = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self.forge_given:
            storage.resize_(0)

    def forge_restore(self) -> None:
        """Take the key-value cache back. Its content is gone."""
        for storage, size in self.forge_given:
            storage.resize_(size)
        for cache in self.model_runner.kv_caches:
            cache.zero_()


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


# Programs that the owner runs while an engine starts inherit the variable, too, but are none of its multiprocessing.
if OWNER in os.environ and multiprocessing.parent_process() is not None:
    _die_with(int(os.environ[OWNER]))
