"""Landlock: restricts the files that a process and its children may open, without privileges."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from .syscalls import call, libc, number

_EXECUTE = 1  # access rights
_WRITE = 2
_READ = 4
_LIST = 8
_TRUNCATION = 3  # ABI version that restricts truncation


def ruleset(readable: Iterable[str]) -> int:
    """Return the descriptor of a ruleset: read access to these files and folders only; no TCP, abstract sockets and
    signals to other processes, as far as the kernel supports them.

    Raises:
        OSError: unsupported by the kernel.
    """
    version = libc.syscall(number("landlock_create_ruleset"), None, 0, 1)
    if version < _TRUNCATION:
        available = f"version {version}" if version > 0 else "none, or it is disabled"
        raise OSError(f"landlock of version {_TRUNCATION} (Linux 6.2) is needed, the kernel has {available}")
    # Newer versions know more access rights, in a longer structure.
    files = (1 << 15) - 1 | (version >= 5) << 15
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = call("landlock_create_ruleset", struct.pack("QQQ", files, 3, 3)[:size], size, 0)
    for path in readable:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        mode = os.fstat(descriptor).st_mode
        access = _EXECUTE | _READ | (_LIST if stat.S_ISDIR(mode) else 0) | (_WRITE if stat.S_ISCHR(mode) else 0)
        call("landlock_add_rule", rules, 1, struct.pack("=Qi", access, descriptor), 0)
        os.close(descriptor)
    return rules


def restrict(rules: int) -> None:
    """Apply the rules to this process, irreversibly. OSError: rejected by the kernel."""
    call("landlock_restrict_self", rules, 0)
