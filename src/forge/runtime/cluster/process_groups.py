"""The store in which the ranks of a process group find one another, on one machine or on several."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .rendezvous import SCHEME

if TYPE_CHECKING:
    import torch.distributed as dist


def process_store(rendezvous: str | None, world_size: int) -> dist.Store | None:
    """Return the store of a process group, whose ranks then accept only connections of this user.

    Args:
        rendezvous: name of a file in TMPDIR that no other process group used, or its whole path; board://HOST:PORT/NAME
            for ranks on several machines; None for a single process, which needs no store.

    Raises:
        ConnectionError: the file's folder is on another machine.
    """
    if rendezvous is None:
        return None
    import torch.distributed as dist

    from .peers import accept_own_user_only

    accept_own_user_only()
    if rendezvous.startswith(SCHEME):
        from .ranks import board_store

        return board_store(rendezvous)
    # In the run's private folder: a TCPStore obeys every local user.
    path = Path(os.environ.get("TMPDIR", tempfile.gettempdir())) / rendezvous
    if not path.parent.is_dir():
        raise ConnectionError(
            f"the ranks of this process group meet in {path.parent}, a folder of the controller's machine: on others "
            "use cluster.hosts in place of a Monarch mesh"
        )
    return dist.FileStore(str(path), world_size)
