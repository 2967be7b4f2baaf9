"""Keep other users of this machine away from the sockets of a run.

Monarch obeys everyone who connects to it, and each of its processes binds a UNIX socket with an abstract name, which
has no permissions: every local user, and every container in the same network namespace, could run code through it.
Monarch 0.7 takes a path for some of its sockets, but has no setting for this one. gloo, by which ranks on CPUs
communicate, listens at the loopback without authentication, and PyTorch is built without an authenticated transport of
gloo. So two functions that these libraries import from the C library are replaced, in this process only:

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

from ..monarch_names import LIBRARY

log = logging.getLogger(__name__)

# Bytes of the folder's path: a socket's path has at most 107 bytes, and names in the folder take up to 67 of them.
MAX_FOLDER_LENGTH = 33
TCP = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # the second one is missing if IPv6 is off
_FAMILY = struct.Struct("=H")
_ABSTRACT = _FAMILY.pack(socket.AF_UNIX) + b"\0"  # how the address of a socket with an abstract name starts
_Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_Accept = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.bind.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32]
_libc.accept.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_folder: Path | None = None  # of the sockets; None before `sockets_in`


@cache
def keep_sockets_private() -> None:
    """Load Monarch's library and replace its `bind`, see the module. Call it before anything of Monarch runs."""
    try:
        library = str(importlib.import_module(LIBRARY).__file__)
    except ImportError:  # the check of Monarch's names reports it
        return
    _replace_import(library, "bind", _bind_private, "every local user can run code as you through Monarch's sockets")


@cache
def accept_own_user_only() -> None:
    """Close connections that other users of this machine open to torch.distributed in this process from now on."""
    import torch

    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    _replace_import(str(library), "accept", _accept_own, "other local users can connect to a trainer's ranks")


def sockets_in(folder: Path) -> None:
    """Have Monarch bind its sockets in this folder from now on. Call it before anything of Monarch runs."""
    global _folder
    _folder = folder


def sockets_folder() -> Path:
    """Return the folder that was given to `sockets_in`, or else the folder for temporary files."""
    return Path(tempfile.gettempdir()) if _folder is None else _folder


@contextmanager
def temporary_files_beside_sockets() -> Iterator[None]:
    """Set TMPDIR to the directory of the sockets within the block, because Monarch creates temporary files there when
    it starts.

    TMPDIR is restored afterwards: other programs inherit it, and Slurm copies it to machines without this folder.
    """
    previous = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(sockets_folder())
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if previous is not None:
            os.environ["TMPDIR"] = previous


@cache
def warn_if_exposed() -> None:
    """Warn once if this process has sockets with abstract names after all: other local users can connect to them."""
    handles = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    sockets = {os.readlink(handle) for handle in handles if handle.is_symlink()}  # such as "socket:[<inode>]"
    try:
        table = Path("/proc/net/unix").read_text(errors="replace")  # names of sockets may be any bytes
    except OSError:  # a container may hide it
        return

    # Each row has 7 fields, the last one the inode, and then the name of a socket that has one; "@" starts abstract
    # names.
    rows = [line.split() for line in table.splitlines()[1:]]
    names = [row[7] for row in rows if len(row) > 7 and row[7].startswith("@") and f"socket:[{row[6]}]" in sockets]
    if names:
        log.warning(
            "every local user, and every container in this network namespace, can run code as you through the sockets "
            "%s: use a machine on which you trust them, and import forge before anything of Monarch runs",
            ", ".join(names),
        )


class _Loaded(ctypes.Structure):
    """A library that the dynamic loader has loaded (the start of C's struct link_map)."""

    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


def _replace_import(library: str, name: str, function: Any, risk: str) -> None:
    """Replace the imported function `name` of a loaded library by `function`.

    It overwrites the entries of the library's import tables. A warning names the `risk` if there is no such entry.
    """
    # The dynamic section of the library: pairs of a tag and a value of 8 bytes each, up to the tag 0.
    link_map = _Loaded.from_address(ctypes.CDLL(library)._handle)
    dynamic_entries: dict[int, int] = {}
    address = link_map.dynamic
    while (tag := ctypes.c_size_t.from_address(address).value) != 0:
        dynamic_entries[tag] = ctypes.c_size_t.from_address(address + 8).value
        address += 16

    # Tags of the System V ABI: 5 the names, 6 the symbols (24 bytes each, which start with the offset of the name), 23
    # and 7 two tables of relocations, 2 and 8 the sizes of these tables.
    slot_addresses = []
    for table_tag, size_tag in ((23, 2), (7, 8)):
        table, size = dynamic_entries.get(table_tag, 0), dynamic_entries.get(size_tag, 0)
        relocations = memoryview(ctypes.string_at(table, size)).cast("Q")
        # A relocation is three numbers: the offset of a slot, the index of a symbol (upper half) with a kind, an
        # addend.
        for slot_offset, symbol_info in zip(relocations[0::3], relocations[1::3], strict=True):
            symbol_index = symbol_info >> 32
            if symbol_index:  # 0 for the library's own functions, which are most
                name_offset = ctypes.c_uint32.from_address(dynamic_entries[6] + 24 * symbol_index).value
                if ctypes.string_at(dynamic_entries[5] + name_offset) == name.encode():
                    slot_addresses.append(link_map.base + slot_offset)

    # The tables may have been made read-only once they were filled.
    for slot in slot_addresses:
        page = slot - slot % mmap.PAGESIZE
        if _libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "a table of imports cannot be written")
        ctypes.c_size_t.from_address(slot).value = ctypes.cast(function, ctypes.c_void_p).value or 0
    if not slot_addresses:
        log.warning("%s of %s was not replaced: %s", name, library, risk)


@_Bind
def _bind_private(handle: int, address: int, length: int) -> int:
    if _folder is None or not ctypes.string_at(address, length).startswith(_ABSTRACT):
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
    """Return whether a TCP connection comes from this user or from another machine, by the kernel's list of sockets."""
    try:
        with socket.socket(fileno=os.dup(handle)) as connection:
            remote, local = connection.getpeername(), connection.getsockname()
        tables = [table.read_text() for table in TCP if table.exists()]
    except OSError:  # it was closed already, or no descriptor is left
        return False

    # The other end of a connection within this machine has a separate row. Fields: 1 its address, 2 ours, 3 the state
    # (01 is ESTABLISHED), 7 the user.
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    remote_port, local_port = f":{remote[1]:04X}", f":{local[1]:04X}"
    connections = (row for row in rows if row[1].endswith(remote_port) and row[2].endswith(local_port))
    users = {row[7] for row in connections if row[3] == "01"}
    if users:
        return users == {str(os.geteuid())}

    # Without a row it is another machine, unless the connection is over the loopback.
    return not local[0].startswith(("127.", "::1"))
