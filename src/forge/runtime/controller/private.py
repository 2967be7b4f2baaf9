"""Sockets of a run that only this user reaches.

Monarch obeys all who connect to it, and each of its processes binds a UNIX socket of an abstract name, which has no
permissions: every local user, and every container in the same network namespace, could run code through it. Monarch 0.7
takes a path for some of its sockets, and for this one it has no setting. gloo, by which ranks on CPUs talk, listens at
the loopback without authentication, and PyTorch's build has no transport of it with one. So two entries in tables of
imports are replaced, in this process only, and nothing else is:

- `bind` of Monarch's library: an abstract name becomes a path in a private folder. Monarch tells its peers the address
  that the kernel reports, so they find the path.
- `accept` of PyTorch's library: a connection from another user of this machine is closed.
"""

import ctypes
import errno
import importlib
import logging
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ...system.scratch import Scratch
from ..monarch_names import LIBRARY

log = logging.getLogger(__name__)

# Bytes of the folder's path: a socket's path has at most 107, of which Monarch's names and ours take 67.
MAX_FOLDER_LENGTH = 33
TCP = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # the second one is missing if IPv6 is off
_FAMILY = struct.Struct("=H")
_ABSTRACT = _FAMILY.pack(socket.AF_UNIX) + b"\0"
_Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_Accept = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.bind.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32]
_libc.accept.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_folder: Path | None = None  # where sockets are bound


@cache
def keep_sockets_private() -> None:
    """Replace `bind` of Monarch's library, which this loads. Call it before anything of Monarch runs."""
    try:
        library = importlib.import_module(LIBRARY).__file__
    except ImportError:  # the check of Monarch's names reports it
        return
    assert library is not None
    _replace_import(library, "bind", _bind_private, "every local user can run code as you through Monarch's sockets")


@cache
def accept_own_user_only() -> None:
    """Close connections of other users of this machine to this process's ranks from now on."""
    import torch

    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    _replace_import(str(library), "accept", _accept_own, "other local users can connect to a trainer's ranks")


def sockets_in(folder: Path) -> None:
    """Have Monarch bind its sockets in this folder from now on. Call it before anything of Monarch runs."""
    global _folder
    _folder = folder


def sockets_folder() -> Path:
    """Return the folder of Monarch's sockets; the temporary files' folder if nothing has set it."""
    return Path(tempfile.gettempdir()) if _folder is None else _folder


@contextmanager
def temporary_files_beside_sockets() -> Iterator[None]:
    """Have Monarch create its temporary files, as it does when it starts, in the folder of its sockets.

    Only meanwhile: other programs inherit the environment, and Slurm copies it to machines without this folder.
    """
    previous = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(sockets_folder())
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if previous is not None:
            os.environ["TMPDIR"] = previous


def socket_folder() -> Scratch:
    """Create a folder for sockets that only this user may enter, with a path that is short enough."""
    folder = tempfile.gettempdir()
    return Scratch("forge-run-", folder if len(os.fsencode(folder)) <= MAX_FOLDER_LENGTH else "/tmp")


@cache
def warn_if_exposed() -> None:
    """Warn once if Monarch's sockets of this process are open to other local users after all."""
    handles = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    sockets = {os.readlink(handle) for handle in handles if handle.is_symlink()}
    try:  # names of sockets may be any bytes, and a container may hide the table
        rows = [line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]]
    except OSError:
        return
    names = [row[7] for row in rows if len(row) > 7 and row[7].startswith("@") and f"socket:[{row[6]}]" in sockets]
    if names:
        log.warning(
            "every local user, and every container in this network namespace, can run code as you through the sockets "
            "%s: use a machine on which you trust them, and import forge before anything of Monarch runs",
            ", ".join(names),
        )


class _Loaded(ctypes.Structure):
    """A loaded library, as the loader has it (struct link_map)."""

    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


def _replace_import(library: str, name: str, function: Any, lost: str) -> None:
    """Let a library call another function instead of one that it imports; `lost` is the protection without that."""
    loaded = _Loaded.from_address(ctypes.CDLL(library)._handle)
    tags: dict[int, int] = {}
    address = loaded.dynamic
    while (tag := ctypes.c_size_t.from_address(address).value) != 0:
        tags[tag] = ctypes.c_size_t.from_address(address + 8).value
        address += 16
    slots = []

    # The dynamic section (System V ABI): 5 names, 6 symbols, 23 and 7 tables of relocations, 2 and 8 their sizes.
    for table, size in ((tags.get(23, 0), tags.get(2, 0)), (tags.get(7, 0), tags.get(8, 0))):
        rows = memoryview(ctypes.string_at(table, size)).cast("Q")  # of slot, symbol and kind, and a number to add
        for index, info in enumerate(rows[1::3]):
            # Most are of the library itself, and have no symbol.
            if info >> 32:
                text = ctypes.c_uint32.from_address(tags[6] + 24 * (info >> 32)).value
                if ctypes.string_at(tags[5] + text) == name.encode():
                    slots.append(loaded.base + rows[3 * index])

    for slot in slots:
        _write_address(slot, ctypes.cast(function, ctypes.c_void_p).value or 0)
    if not slots:
        log.warning("%s of %s was not replaced: %s", name, library, lost)


def _write_address(slot: int, value: int) -> None:
    """Write an address into a table that the loader may have made read-only."""
    page = slot - slot % mmap.PAGESIZE
    if _libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "a table of imports cannot be written")
    ctypes.c_size_t.from_address(slot).value = value


@_Bind
def _bind_private(handle: int, address: int, length: int) -> int:
    requested = ctypes.string_at(address, length)
    if _folder is None or not requested.startswith(_ABSTRACT):
        return _libc.bind(handle, address, length)
    path = _FAMILY.pack(socket.AF_UNIX) + os.fsencode(_folder / os.urandom(8).hex())
    replacement = ctypes.create_string_buffer(path)
    return _libc.bind(handle, ctypes.addressof(replacement), len(replacement))


@_Accept
def _accept_own(listener: int, address: int, length: int) -> int:
    handle = _libc.accept(listener, address, length)
    if handle < 0 or _is_from_own_user(handle):
        return handle
    os.close(handle)
    ctypes.set_errno(errno.EAGAIN)  # gloo waits for the next one; it ends the process at other errors
    return -1


def _is_from_own_user(handle: int) -> bool:
    """Return whether a connection comes from another machine, or from this user, as the kernel's list of connections
    says."""
    try:
        with socket.socket(fileno=os.dup(handle)) as connection:
            remote, local = connection.getpeername(), connection.getsockname()
        rows = [row.split() for table in TCP if table.exists() for row in table.read_text().splitlines()[1:]]
    except OSError:  # it was closed already, or no descriptor is left
        return False
    # The peer's row has its port as the local one (field 1) and ours as the remote one; 01 is ESTABLISHED.
    ends = (f":{remote[1]:04X}", f":{local[1]:04X}")
    users = {row[7] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1]) and row[3] == "01"}
    return users == {str(os.geteuid())} if users else not local[0].startswith(("127.", "::1"))
