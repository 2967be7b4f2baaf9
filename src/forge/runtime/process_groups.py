"""The store in which the ranks of a process group find one another, on one machine or on several."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

TCP = "tcp://"


def process_store(rendezvous: str | None, world_size: int, rank: int = 0) -> dist.Store | None:
    """Return the store of a process group, whose ranks then accept only connections of this user.

    Args:
        rendezvous: name of a file in TMPDIR that no other process group used, or its whole path; tcp://HOST:PORT of
            rank 0 for ranks on several machines; None for a single process, which needs no store.

    Raises:
        ConnectionError: the file's folder is on another machine.
    """
    if rendezvous is None:
        return None
    import torch.distributed as dist

    from .controller.private import accept_own_user_only

    accept_own_user_only()
    if rendezvous.startswith(TCP):
        host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
        return dist.TCPStore(host, int(port), world_size, rank == 0)

    # In the run's private folder: a TCPStore obeys every local user.
    path = Path(os.environ.get("TMPDIR", tempfile.gettempdir())) / rendezvous
    if not path.parent.is_dir():
        raise ConnectionError(
            f"the ranks of this process group meet in {path.parent}, a folder of the controller's machine: on others "
            "use cluster.hosts instead of a Monarch mesh"
        )

    return dist.FileStore(str(path), world_size)
