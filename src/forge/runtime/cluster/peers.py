"""Ranks that accept connections of their own user alone.

gloo's ranks exchange tensors, and pickled objects, over TCP without authentication: another user of the machine who
connects in the place of a rank could read them, or run code here. gloo has no setting for that, so `accept` of torch's
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

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # the second one is missing where IPv6 is off
_Accept = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.accept.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


@cache
def accept_own_user_only() -> None:
    """Do so from now on, in this process."""
    if not _TABLES[0].exists():
        log.warning("%s is hidden here: other local users can connect to the ranks of a trainer", _TABLES[0])
        return
    replace("/torch/lib/libtorch_cpu.so", {"accept": _accept}, "other local users can connect to a trainer's ranks")


@_Accept
def _accept(listener: int, address: int, length: int) -> int:
    handle = _libc.accept(listener, address, length)
    if handle >= 0 and not _own(handle):
        os.close(handle)
        ctypes.set_errno(errno.EAGAIN)  # gloo waits for the next one; it ends the process at other errors
        return -1
    return handle


def _own(handle: int) -> bool:
    """Whether a connection comes from another machine, or from this user."""
    try:
        with socket.socket(fileno=os.dup(handle)) as connection:
            return from_own_user(connection.getpeername(), connection.getsockname())
    except OSError:  # it has ended already, or no descriptor is left
        return False


def from_own_user(there: tuple, here: tuple) -> bool:
    """Whether a connection from `there` comes from another machine, or from this user. The kernel lists each end with
    its user.

    Raises:
        OSError: the kernel's list cannot be read.
    """
    tables = [table.read_text() for table in _TABLES if table.exists()]
    ends = (f":{there[1]:04X}", f":{here[1]:04X}")
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    users = {int(row[7]) for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1]) and row[3] == "01"}
    if users:
        return users == {os.geteuid()}
    return not here[0].startswith(("127.", "::1"))  # another machine's
