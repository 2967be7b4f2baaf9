"""Namespaces in which programs run: with a root that only has Python, and without network and other processes."""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

from .syscalls import check_result, libc, make_call
from .wire import Settings

# Flags of unshare.
NEW_PID = 0x20000000
_NEW_MOUNTS = 0x20000
_NEW_NETWORK = 0x40000000
# Also new host names, IPC, users and cgroups.
_ALL = _NEW_MOUNTS | NEW_PID | 0x4000000 | 0x8000000 | 0x10000000 | _NEW_NETWORK | 0x2000000
# Flags of mount and umount2.
_READ_ONLY = 1
_NO_SUID = 2
_NO_DEVICE = 4
_NO_EXEC = 8
_BIND = 4096
_MOVE = 8192
_RECURSIVE = 16384
_PRIVATE = 1 << 18
_DETACH = 2
_ALL_BELOW = 0x8000  # AT_RECURSIVE
NOBODY = 65534
# Where a program's /tmp is mounted before it is moved.
_SCRATCH = "/.tmp"
_OF_COMMANDS = ("/dev/shm", "/dev/pts", "/var/tmp")  # further folders in the root of a command
_LINKS_IN_DEV = {
    **{"/dev/fd": "/proc/self/fd", "/dev/stdin": "fd/0", "/dev/stdout": "fd/1", "/dev/stderr": "fd/2"},
    "/dev/ptmx": "pts/ptmx",
}
_SET_FLAGS, _UP = 0x8914, 0x41  # SIOCSIFFLAGS; IFF_UP and IFF_RUNNING
_ROOT = "/sys"  # where the new root is mounted first: a folder that never contains Python
# What programs need of the system: libraries and time zones, nothing that describes the machine.
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
# Devices without a state.
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


def enter_namespaces(network: bool = True) -> None:
    """Move this process to new namespaces; the next forked process is the first one of the namespace of processes.

    Args:
        network: whether to enter a new network too, in which nothing can be reached.

    Raises:
        OSError: the system does not permit it.
    """
    kinds = _ALL if network else _ALL & ~_NEW_NETWORK
    uid = os.geteuid()
    gid = os.getegid()
    if uid:
        _unshare_namespaces(kinds)
        _map_users(os.getpid(), f"{NOBODY} {uid} 1", f"{NOBODY} {gid} 1", "deny")
        return

    # Two users exist in the namespace: root, who can read Python's folders, and the one that programs run as. Their map
    # must be written by a process that is root outside of the namespace: a helper, forked before.
    pid = os.getpid()
    ready, go = os.pipe()
    helper = os.fork()

    if not helper:
        os.close(go)
        os.read(ready, 1)
        users = f"0 0 1\n{NOBODY} {NOBODY} 1"
        try:
            _map_users(pid, users, users, "allow")
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)

    try:
        _unshare_namespaces(kinds)
    finally:
        os.close(go)
        os.close(ready)
        _, status = os.waitpid(helper, 0)

    if status:
        raise OSError(os.waitstatus_to_exitcode(status), f"mapping user {NOBODY} into a namespace failed")


def readable_paths(settings: Settings) -> list[str]:
    """Return the real paths of Python, of system libraries and of the settings, without paths within others.

    Raises:
        FileNotFoundError: a path of the settings does not exist.
    """
    for path in settings["readable"]:
        os.stat(path)
    python = [
        sys.executable,
        f"{sys.base_prefix}/{sys.platlibdir}",
        f"{sys.base_prefix}/lib",
        os.path.dirname(os.__file__),
    ]

    # Sorted, so that a folder comes before the paths within it, which need no separate mount.
    candidates = sorted({os.path.realpath(path) for path in (*python, *_SYSTEM, *settings["readable"])})
    paths: list[str] = []
    for path in candidates:
        if os.path.exists(path) and not any(path.startswith(f"{folder}/") for folder in paths):
            paths.append(path)

    return [*paths, *(path for path in DEVICES if os.path.exists(path))]


def links_to(settings: Settings) -> dict[str, str]:
    """Return the symbolic links on the way to the paths of the settings, and those in /, each with its target."""
    links: dict[str, str] = {}
    for path in ("/bin", "/lib", "/lib64", *settings["readable"]):
        # Part by part, as the kernel resolves a path: after a link it continues at the target.
        resolved = "/"
        parts = path.split("/")
        while parts:
            step = os.path.normpath(os.path.join(resolved, parts.pop(0)))
            if os.path.islink(step):
                links[step] = os.readlink(step)
                parts = links[step].split("/") + parts
                resolved = "/" if links[step].startswith("/") else resolved
            else:
                resolved = step
    return links


def new_root(
    readable: Iterable[str],
    links: dict[str, str],
    writable: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Replace the root by a read-only one that has certain files, folders and links, an empty /tmp, and /proc.

    Args:
        readable: the paths of the files and folders.
        links: symbolic links with their targets.
        writable: folders that can be written to, keyed by their paths in the new root. If there are any, the root also
            has shared memory and terminals, as commands need.

    Raises:
        OSError: a mount failed; the message has its target.
    """
    mount_target(None, "/", None, _RECURSIVE | _PRIVATE)
    mount_target("tmpfs", _ROOT, "tmpfs", _NO_SUID | _NO_DEVICE, "size=1m,mode=755")

    # Before the readable paths, which may be within these folders.
    for inner, path in writable.items():
        os.makedirs(_ROOT + inner)
        mount_target(path, _ROOT + inner, None, _BIND | _RECURSIVE)
        _set_attributes(_ROOT + inner, _NO_SUID | _NO_DEVICE)

    for path in readable:
        target = _ROOT + path
        _make_node(target, os.path.isdir(path))
        mount_target(path, target, None, _BIND | _RECURSIVE)
        flags = _NO_SUID if path.startswith("/dev/") else _NO_SUID | _NO_DEVICE | _READ_ONLY
        _set_attributes(target, flags)

    for folder in ("/tmp", _SCRATCH, "/proc", *(_OF_COMMANDS if writable else ())):
        os.makedirs(_ROOT + folder, exist_ok=True)
    if writable:
        mount_target("tmpfs", f"{_ROOT}/dev/shm", "tmpfs", _NO_SUID | _NO_DEVICE | _NO_EXEC, "size=64m,mode=1777")
        links = links | _LINKS_IN_DEV
        with suppress(OSError):  # few programs need terminals, which are not permitted everywhere
            mount_target(
                "devpts", f"{_ROOT}/dev/pts", "devpts", _NO_SUID | _NO_EXEC, "newinstance,ptmxmode=0666,mode=0620"
            )

    for link, target in links.items():
        _make_link(target, _ROOT + link)

    # The kernel permits a separate /proc for each program only where a full one is mounted already.
    mount_proc(f"{_ROOT}/proc")
    _set_attributes(_ROOT, _READ_ONLY, 0)
    os.chdir(_ROOT)
    make_call("pivot_root", b".", b".")
    check_result(libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def open_loopback() -> None:
    """Set up the loopback device of this process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))


def private_mounts(scratch_mb: int, readable: Iterable[str], links: dict[str, str]) -> None:
    """Mount a separate /tmp and, if permitted, /proc for this process, which is the first one of its namespace.

    Args:
        scratch_mb: the size of /tmp.
        readable, links: as in `new_root`; those in /tmp are added to the new /tmp.
    """
    _unshare_namespaces(_NEW_MOUNTS)
    mount_target(
        "tmpfs", _SCRATCH, "tmpfs", _NO_SUID | _NO_DEVICE | _NO_EXEC, f"size={scratch_mb}m,nr_inodes=1024,mode=1777"
    )
    for path in readable:
        if path.startswith("/tmp/"):
            target = _SCRATCH + path.removeprefix("/tmp")
            _make_node(target, os.path.isdir(path))
            mount_target(path, target, None, _BIND | _RECURSIVE)
    for link, target in links.items():
        if link.startswith("/tmp/"):
            _make_link(target, _SCRATCH + link.removeprefix("/tmp"))
    mount_target(_SCRATCH, "/tmp", None, _MOVE)
    mount_proc("/proc", "subset=pid")  # without what describes the machine, such as /proc/cmdline


def _set_attributes(target: str, flags: int, depth: int = _ALL_BELOW) -> None:
    """Set flags of a mount and, unless `depth` is 0, of all mounts below it."""
    # -100 is AT_FDCWD, for paths that are relative to the current folder.
    make_call("mount_setattr", -100, target.encode(), depth, struct.pack("QQQQ", flags, 0, 0, 0), 32)


def _make_node(target: str, folder: bool) -> None:
    os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)
    if not folder:
        os.close(os.open(target, os.O_CREAT))


def _make_link(target: str, link: str) -> None:
    if not os.path.lexists(link):  # a parent folder may be mounted
        os.makedirs(os.path.dirname(link), exist_ok=True)
        os.symlink(target, link)


def mount_proc(target: str, settings: str | None = None) -> None:
    """Mount /proc, if permitted. In containers that mask parts of it, it is not, and programs run without /proc."""
    with suppress(PermissionError):
        mount_target("proc", target, "proc", _NO_SUID | _NO_DEVICE | _NO_EXEC | _READ_ONLY, settings)


def _unshare_namespaces(kinds: int) -> None:
    check_result(libc.unshare(kinds), "unshare (new namespaces)")


def _map_users(pid: int, users: str, groups: str, setgroups: str) -> None:
    for name, text in (("setgroups", setgroups), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def mount_target(source: str | None, target: str, kind: str | None, flags: int, settings: str | None = None) -> None:
    """Mount a file system by mount(2); OSError, whose message has the target, if it fails."""
    *places_and_kind, options = [None if text is None else text.encode() for text in (source, target, kind, settings)]
    check_result(libc.mount(*places_and_kind, ctypes.c_ulong(flags), options), f"mount {target}")
