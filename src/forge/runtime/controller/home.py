"""The controller's process: the private folder of its sockets, and the server that forks its children."""

import os
import tempfile
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
        # Only this user may enter it, and its path is short enough for sockets.
        folder = tempfile.gettempdir()
        is_short = len(os.fsencode(folder)) <= private.MAX_FOLDER_LENGTH
        _scratch = Scratch("forge-run-", folder if is_short else "/tmp")
        private.sockets_in(_scratch.path)
    return _scratch.path


def check_private_folder() -> None:
    """Check that the folder of the sockets still exists: cleaners of temporary files remove old folders.

    Raises:
        Unrecoverable: it was removed; says how to exclude it from the cleaning.
    """
    if _scratch is not None and not _scratch.path.is_dir():
        raise Unrecoverable(
            f"{_scratch.path}, the directory of this run's sockets, was removed, so no process can be started: "
            "exclude forge-run-* from the cleanup of temporary files"
        )


@contextmanager
def forked_processes() -> Iterator[None]:
    """Within the block, fork new processes from a server that has imported PyTorch and transformers.

    The server starts with the block and ends with it. A process that needs both libraries then starts in a fraction of
    a second. FORGE_FORK_SERVER=0 turns this off. Within another such block its server is used, as long as the
    environment variables that libraries read are the same.
    """
    global _server
    outer = _server
    if os.environ.get("FORGE_FORK_SERVER") == "0" or (outer is not None and outer.has_environment(os.environ)):
        yield
        return

    # It sees no accelerator: a process that has opened one cannot be forked.
    server = _server = ForkServer(private_folder(), {**processes.library_environment(), VISIBLE[0]: ""})
    try:
        yield
    finally:
        _server = outer
        server.end()


def fork_server() -> ForkServer | None:
    """Return the fork server of the innermost `forked_processes` block; None outside of one."""
    return _server
