"""Restrict the connections of ranks to the same user.

gloo's ranks exchange tensors, and pickled objects, over TCP without authentication: another user of the machine who
impersonates a rank could read them, or run code. gloo has no setting for that, so `accept` of torch's
library is replaced: it closes connections from this machine that belong to another user.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
from functools import cache
from pathlib import Path

from ...system.interpose import replace

log = logging.getLogger(__name__)

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # the second one is missing if IPv6 is off
_Accept = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.accept.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


@cache
def accept_own_user_only() -> None:
    """Reject connections of other users of this machine to this process's ranks from now on."""
    if not _TABLES[0].exists():
        log.warning("%s is hidden on this machine: other local users can connect to the ranks of a trainer", _TABLES[0])
        return
    replace("/torch/lib/libtorch_cpu.so", {"accept": _accept}, "other local users can connect to a trainer's ranks")


@_Accept
def _accept(listener: int, address: int, length: int) -> int:
    handle = _libc.accept(listener, address, length)
    if handle >= 0 and not _is_allowed(handle):
        os.close(handle)
        ctypes.set_errno(errno.EAGAIN)  # gloo waits for the next one; it ends the process at other errors
        return -1
    return handle


def _is_allowed(handle: int) -> bool:
    """Whether a connection comes from another machine, or from this user."""
    try:
        with socket.socket(fileno=os.dup(handle)) as connection:
            return from_own_user(connection.getpeername(), connection.getsockname())
    except OSError:  # it was closed already, or no descriptor is left
        return False


def from_own_user(remote: tuple, local: tuple) -> bool:
    """Whether a connection from the address `remote` comes from another machine, or from this user. The kernel lists
    each end of a connection with its user.
    its user.

    Raises:
        OSError: the kernel's list cannot be read.
    """
    tables = [table.read_text() for table in _TABLES if table.exists()]
    remote_port = f":{remote[1]:04X}"
    local_port = f":{local[1]:04X}"
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    # The peer's row has its port as the local one (field 1) and ours as the remote one; 01 is ESTABLISHED.
    users = {
        int(row[7]) for row in rows if row[1].endswith(remote_port) and row[2].endswith(local_port) and row[3] == "01"
    }
    if users:
        return users == {os.geteuid()}
    return not local[0].startswith(("127.", "::1"))  # the peer is on another machine
