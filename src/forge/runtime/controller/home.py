"""The controller's process: the private folder of its sockets, and the server that forks its children."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...system.scratch import Scratch, sweep_folders
from ..forking.forkserver import ForkServer
from ..inventory import VISIBLE
from . import private, processes
from .errors import Unrecoverable

_scratch: Scratch | None = None
_server: ForkServer | None = None


def private_folder() -> Path:
    """Return the folder of this process's sockets, created on first use."""
    global _scratch
    if _scratch is None:
        sweep_folders()
        _scratch = private.socket_folder()
        private.sockets_in(_scratch.path)
    return _scratch.path


def check_private_folder() -> None:
    """Raise Unrecoverable if the folder of the sockets was removed, as by a cleaner of temporary files."""
    if _scratch is not None and not _scratch.path.is_dir():
        raise Unrecoverable(
            f"{_scratch.path}, which holds this run's sockets, was removed: no process can be started any more. "
            "Exclude forge-run-* where temporary files are cleaned up"
        )


@contextmanager
def forked_processes() -> Iterator[None]:
    """Within this context, fork processes from a server that starts now and imports PyTorch and transformers.

    A process that needs both then starts in a fraction of a second. The variable FORGE_FORK_SERVER=0 turns it off. The
    server of a context around this one is used as long as the environment is the same.
    """
    global _server
    outer = _server
    if os.environ.get("FORGE_FORK_SERVER") == "0" or (outer is not None and outer.has_environment(os.environ)):
        yield
        return
    server = _server = ForkServer(private_folder(), {**processes.library_environment(), VISIBLE[0]: ""})
    try:
        yield
    finally:
        _server = outer
        server.end()


def fork_server() -> ForkServer | None:
    """Return the fork server of this process, if there is one."""
    return _server
