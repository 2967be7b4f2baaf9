"""Private places for Monarch's sockets and log, to which only this user has access.

Monarch obeys all who connect to it, and binds UNIX sockets with abstract names. These have no permissions: every local
user, and every container in the same network namespace, finds them in /proc/net/unix and can run code through them.
Its log is a file of a predictable name in /tmp, where another user may have put a link. Monarch 0.7 has no setting for
either, so three functions that its library imports from libc are replaced in this process:

- `bind`: an abstract name becomes a path in a private folder. Monarch advertises the address that the kernel reports,
  so its peers find the path.
- `open64` and `mkdir`, while the library is loaded: the log becomes the file that FORGE_MONARCH_LOG names, or one
  without a name, which goes with the process.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ...system.interpose import replace
from ...system.scratch import Scratch
from ..monarch_names import LIBRARY, MAPPED

log = logging.getLogger(__name__)

LOG = "FORGE_MONARCH_LOG"
_FAMILY = struct.Struct("=H")
_ABSTRACT = _FAMILY.pack(socket.AF_UNIX) + b"\0"
_LOG_FOLDER = re.compile(rb"/tmp/[^/]+")
_LOG_FILE = re.compile(rb"/tmp/[^/]+/monarch_log[^/]*")
_ANNOUNCEMENT = b"Monarch internal logs are being written to"
# Bytes of the folder's path: a socket's path has at most 107, of which Monarch's names and ours take 67.
MAX_FOLDER_LENGTH = 33
_Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_Open = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32, use_errno=True)
_Write = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, use_errno=True)
_Mkdir = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32, use_errno=True)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.bind.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32]
_libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_libc.write.restype = ctypes.c_ssize_t
_folder: Path | None = None  # where sockets are bound
_log_handle: int | None = None
_replacements: list[object] = []  # callbacks, which must outlive their use


def load() -> None:
    """Load Monarch's library with its log and its sockets in private places, before anything imports Monarch."""
    if LIBRARY in sys.modules:  # imported before forge: its log is open already
        replace(MAPPED, {"bind": _bind})
        return
    monarch = find_spec("monarch")
    folders = [] if monarch is None else [Path(folder) for folder in monarch.submodule_search_locations or ()]
    path = next((str(file) for folder in folders for file in folder.glob(f"{Path(MAPPED).name}*.so")), None)
    # The functions of a library can be replaced once it is mapped, and it opens its log when Python initialises it.
    if path is not None:
        try:
            ctypes.CDLL(path)
        except OSError as error:  # it needs libraries that its package loads
            log.debug("%s: %s", path, error)
    restore = replace(MAPPED, {"open64": _open, "mkdir": _mkdir}, "Monarch's log is in /tmp").restore
    try:
        importlib.import_module(LIBRARY)
    finally:
        restore()
    replace(MAPPED, {"bind": _bind})


def sockets_in(folder: Path) -> None:
    """Have Monarch bind its sockets in this folder from now on. Call it before anything of Monarch runs."""
    global _folder
    _folder = folder


def sockets_folder() -> Path:
    """Return the folder of Monarch's sockets; that of temporary files if nothing has set it."""
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
        if previous is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = previous


def socket_folder() -> Scratch:
    """Create a folder for sockets that only this user may enter, with a path that is short enough."""
    folder = tempfile.gettempdir()
    return Scratch("forge-run-", folder if len(os.fsencode(folder)) <= MAX_FOLDER_LENGTH else "/tmp")


def log_to(path: Path | None) -> None:
    """Write Monarch's log to this file, also in processes started from now on. None: to a file without a name."""
    os.environ.pop(LOG, None)
    if path is not None:
        os.environ[LOG] = str(path.absolute())
    if _log_handle is not None:
        handle = _open_log()
        os.dup2(handle, _log_handle)  # Monarch writes to the same number as before
        os.close(handle)


@contextmanager
def hidden_announcement() -> Iterator[None]:
    """Suppress the line in which Monarch, once its first host is up, names a log that `_open` has replaced.

    Monarch's threads write through Python meanwhile. One that does so while the interpreter exits ends the process
    ("FATAL: exception not rethrown", before Python 3.14), so this lasts no longer than the start of the host.
    """
    if _log_handle is None:
        yield
        return
    hiding = False

    @_Write
    def write(handle: int, text: int, length: int) -> int:
        nonlocal hiding
        part = ctypes.string_at(text, length) if handle == 2 else b""
        # The line may come in several writes: hide from its first one to the line break.
        hiding = hiding or part.startswith(_ANNOUNCEMENT)
        if handle != 2 or not hiding:
            return _libc.write(handle, text, length)
        if part.endswith(b"\n"):
            hiding = False
            restore()
        return length

    _replacements.append(write)  # another thread may still be in it after `restore`
    restore = replace(MAPPED, {"write": write}).restore
    try:
        yield
    finally:
        restore()


def _open_log() -> int:
    if LOG in os.environ:
        with suppress(OSError):  # its folder was removed
            return os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@cache
def warn_if_exposed() -> None:
    """Warn once if Monarch's sockets of this process are open to other local users after all."""
    sockets = set()
    for handle in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{handle}"))
        except FileNotFoundError:  # the one that lists the folder
            continue
    try:  # names of sockets may be any bytes
        table = Path("/proc/net/unix").read_bytes().decode(errors="replace")
    except OSError:  # a container may hide it
        return
    rows = [line.split() for line in table.splitlines()[1:]]
    names = [row[7] for row in rows if len(row) > 7 and row[7].startswith("@") and f"socket:[{row[6]}]" in sockets]
    if names:
        log.warning(
            "every local user, and every container in this network namespace, can run code as you through the sockets "
            "%s: use a machine on which you trust them, and import forge before anything of Monarch runs",
            ", ".join(names),
        )


@_Bind
def _bind(handle: int, address: int, length: int) -> int:
    requested = ctypes.string_at(address, length)
    if _folder is None or not requested.startswith(_ABSTRACT):
        return _libc.bind(handle, address, length)
    path = _FAMILY.pack(socket.AF_UNIX) + os.fsencode(_folder / os.urandom(8).hex())
    replacement = ctypes.create_string_buffer(path)
    return _libc.bind(handle, ctypes.addressof(replacement), len(replacement))


@_Open
def _open(path: bytes, flags: int, mode: int) -> int:
    global _log_handle
    if not _LOG_FILE.fullmatch(path):
        return _libc.open64(path, flags, mode)
    _log_handle = _open_log()
    return _log_handle


@_Mkdir
def _mkdir(path: bytes, mode: int) -> int:
    return 0 if _LOG_FOLDER.fullmatch(path) else _libc.mkdir(path, mode)
