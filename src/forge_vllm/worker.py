"""Code of vLLM's worker processes: load weights from a `Handover`, and free memory on a CPU.

vLLM mixes `WorkerExtension` into its worker class. Importing this module kills the worker when the engine's process
ends: otherwise workers would outlive a killed engine and keep its memory. Nothing else imports it.
"""

import multiprocessing
import os
import select
import signal
import threading
from typing import Any

from torch import Tensor

from .arguments import OWNER
from .handover import TensorLocation, read_handover


def _die_with(owner: int) -> None:
    """Kill this process as soon as the process with the id `owner` ends."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:  # the owner has ended already
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait_for_owner() -> None:
        select.select([handle], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_owner, name="forge-owner", daemon=True).start()


class WorkerExtension:
    """Methods that `VLLMEngine` calls through `collective_rpc`."""

    model_runner: Any

    def forge_load(self, path: str, locations: list[TensorLocation], dtype: str) -> None:
        """Replace the model's weights by a `Handover`'s; the arguments are its attributes of these names."""
        from vllm.platforms import current_platform

        # On a CPU the kernels of experts read packed weights, and vLLM 0.32 packs reloaded weights only for a new
        # kernel: an old one would compute with unpacked weights, without an error.
        for module in self.model_runner.get_model().modules() if current_platform.is_cpu() else ():
            method = getattr(module, "quant_method", None)
            if method is not None and hasattr(method, "moe_kernel"):
                method.moe_kernel = None
        # vLLM's messages turn tuples into lists.
        locations = [(name, tuple(shape), start) for name, shape, start in locations]
        self.reload_weights(weights_iterator=read_handover(path, locations, dtype))  # type: ignore[attr-defined]

    def forge_release(self) -> None:
        """Free the key-value cache on a CPU, where vLLM's sleep mode does nothing."""
        # The caches of several layers may be views of the same storage.
        caches: list[Tensor] = self.model_runner.kv_caches
        storages = {storage.data_ptr(): storage for storage in (cache.untyped_storage() for cache in caches)}
        self.freed_storages = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self.freed_storages:
            storage.resize_(0)

    def forge_restore(self) -> None:
        """Allocate the key-value cache again, empty."""
        for storage, size in self.freed_storages:
            storage.resize_(size)
        for cache in self.model_runner.kv_caches:
            cache.zero_()


# Other programs that the owner starts at the same time inherit the variable, too, but have no multiprocessing parent.
if OWNER in os.environ and multiprocessing.parent_process() is not None:
    _die_with(int(os.environ[OWNER]))
