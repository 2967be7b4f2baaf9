"""The imports from Monarch, with the settings that it needs before it is first imported.

Private names of Monarch are in `forge.runtime.monarch_names`.

Monarch queries the state of each process every 2 s here (every 10 s by default): every .5 s took .6 % of a core.
`ProcessGroup` notices when a process ends or hangs. Monarch's own judgement is the last resort, after 60 s: thousands
of calls in flight can delay the answers to the controller for tens of seconds. Monarch gives up a process that needs
more than 30 s to start, which is an error here, and the supervisor starts another one; with longer limits Monarch 0.7
loses such a process without an error. By default an actor that was not queried for 60 s of wall-clock time is stopped
as an orphan, even if the clock was set or the machine slept. Here the limit is 10 min; it is needed for the actors of a
lost controller on hosts that only the user can stop.
"""

import atexit
import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from .. import monarch_names
from . import private

for _key, _value in {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "2s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "10m",
}.items():
    os.environ.setdefault(_key, _value)

EXIT_TIMEOUT = 3.0  # seconds for Monarch's threads to end; a lost host's never do


def wait_for_threads() -> None:
    """Wait until Monarch's threads have ended, before Python ends.

    Monarch waits one second for them, which is too short on a busy machine. A thread that is left would ask for the
    interpreter while it ends: Python before 3.14 then unwinds the thread's stack, and Monarch's library aborts a
    process whose work is done.
    """
    deadline = time.monotonic() + EXIT_TIMEOUT
    while time.monotonic() < deadline and _has_monarch_threads():
        time.sleep(0.01)


def _has_monarch_threads() -> bool:
    for name_file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            if name_file.read_text().startswith("monarch-pytokio"):
                return True
    return False


# Functions at exit run in the reverse order: this one after Monarch's own, which are registered by its import.
if "monarch" not in sys.modules:
    atexit.register(wait_for_threads)
private.keep_sockets_private()
monarch_names.check_monarch()

import monarch.actor as _monarch_actor  # noqa: E402
from monarch.actor import (  # noqa: E402
    Actor,
    ActorError,
    HostMesh,
    MeshFailure,
    ProcMesh,
    attach_to_workers,
    concurrent_endpoint,
    context,
    current_rank,
    enable_transport,
    run_worker_loop_forever,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch.config import get_global_config  # noqa: E402

from ..monarch_names import (  # noqa: E402
    BootstrapCommand,
    EndpointProperty,
    SupervisionError,
    config,
    reload_config_from_env,
)

# Messages of this library name their component themselves, and a process may log before it has an actor.
config.prefix_python_logs_with_actor = False

__all__ = [
    "Actor",
    "ActorError",
    "BootstrapCommand",
    "EndpointProperty",
    "HostMesh",
    "MeshFailure",
    "ProcMesh",
    "SupervisionError",
    "attach_to_workers",
    "concurrent_endpoint",
    "context",
    "current_rank",
    "enable_tls",
    "end_at_exit",
    "get_global_config",
    "new_service_proc_id",
    "run_worker_loop_forever",
    "set_fault_hook",
    "this_host",
    "this_proc",
]


def new_service_proc_id():
    """Return a new identity for a host's worker process: the part of its address before the `@`."""
    from monarch.job import new_service_proc_id as new  # here, as it imports pyarrow and flask

    return new()


@cache
def enable_tls(address: str) -> None:
    """Have Monarch listen at `address` of this machine, with the TLS certificates that the environment names.

    Call it before anything of Monarch runs.
    """
    reload_config_from_env()
    enable_transport(f"tls://[{address}]:0" if ":" in address else f"tls://{address}:0")


def set_fault_hook(hook):
    """Have Monarch call `hook(failure)` for faults that no call is waiting on; a fault is handled once it returns."""
    _monarch_actor.unhandled_fault_hook = hook


@cache
def end_at_exit() -> None:
    """Register the end of Monarch's client for the exit of this process; call it once there is a client.

    Monarch ends its client itself, later, but allows one second for it: on a busy machine it prints a traceback.
    """
    atexit.register(_end_monarch)


def _end_monarch() -> None:
    with suppress(TimeoutError):  # the process ends anyway
        shutdown_context(host_timeout=0.3).get(timeout=10.0)
