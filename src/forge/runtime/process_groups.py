"""The key-value store by which the ranks of a torch.distributed process group find one another."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

TCP = "tcp://"


def process_store(rendezvous: str | None, world_size: int, rank: int = 0) -> "dist.Store | None":
    """Return the store of a new process group; None without a rendezvous, as a single process needs no store.

    From then on this process accepts no torch.distributed connections of other users of its machine.

    Args:
        rendezvous: for ranks on one machine, the name of a new file in TMPDIR, or its whole path; for ranks on several
            machines, tcp://HOST:PORT of rank 0.

    Raises:
        ConnectionError: the file's folder is not on this machine.
    """
    if rendezvous is None:
        return None

    import torch.distributed as dist

    from .controller.private import accept_own_user_only

    accept_own_user_only()
    if rendezvous.startswith(TCP):
        host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
        return dist.TCPStore(host, int(port), world_size, rank == 0)

    # TMPDIR is the run's private folder. On one machine a TCPStore would obey every local user.
    path = Path(os.environ.get("TMPDIR", tempfile.gettempdir())) / rendezvous
    if not path.parent.is_dir():
        raise ConnectionError(
            f"the ranks of this process group meet in {path.parent}, a directory of the controller's machine: for "
            "several machines use cluster.hosts instead of a Monarch mesh"
        )

    return dist.FileStore(str(path), world_size)
