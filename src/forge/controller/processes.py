"""Starting processes: one Monarch process mesh per replica, with its environment set before anything is imported."""

from __future__ import annotations

import ctypes
import functools
import os
import signal

from ..observability.metrics import PROCESS_NAME
from ._monarch import ProcMesh, this_host
from .errors import ForgeError


class ProcessGroup:
    """The processes of one replica, or the one process that light components share.

    `starting` counts the components that are being built in them: importing large libraries can hold the interpreter
    for seconds, and silence then is no sign of a hang.
    """

    def __init__(self, mesh: ProcMesh, *, shared: bool) -> None:
        self.mesh = mesh
        self.shared = shared
        self.starting = 0


def spawn(name: str, procs: int, *, threads: int, env: dict[str, str], gpus: list[str] | None = None) -> ProcMesh:
    """Start `procs` processes on this host.

    Args:
        threads: compute threads of each process (OMP_NUM_THREADS).
        env: further environment variables.
        gpus: the devices that the processes may see, `len(gpus) // procs` for each.
    """
    settings = {
        "OMP_NUM_THREADS": str(threads),
        # Idle OpenMP workers otherwise spin on the cores that another process is computing on.
        "GOMP_SPINCOUNT": "2000",
        "TOKENIZERS_PARALLELISM": "false",
        # One loading bar from each process at once is noise.
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus or []),
        PROCESS_NAME: name,
        **env,
    }
    return this_host().spawn_procs({"procs": procs}, bootstrap=functools.partial(_bootstrap, settings), name=name)


def _bootstrap(settings: dict[str, str]) -> None:
    """Runs in each new process before its actors: environment, and no reaction of its own to Ctrl-C."""
    os.environ.update(settings)
    # A terminal sends Ctrl-C to every process; only the controller acts on it, so that the shutdown has one owner.
    # Python's signal module refuses outside the main thread, and this is not the main thread.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGINT, ctypes.c_void_p(1))  # SIG_IGN


def visible_gpus() -> list[str]:
    """The GPUs of this host that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(index) for index in range(torch.cuda.device_count())]


def take_gpus(free: list[str], count: int, component: str) -> list[str]:
    """Take `count` devices from `free`, or say what is missing."""
    if count > len(free):
        raise ForgeError(
            f"{component} asks for {count} GPUs and {len(free)} are free on this host: lower procs or num_replicas, "
            f"or set services.{component}.with_gpus to false"
        )
    taken, free[:] = free[:count], free[count:]
    return taken


def kill(pid: int) -> None:
    """SIGKILL a process that may already be gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
