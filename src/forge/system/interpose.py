"""Interposition: replace functions that a loaded library imports, in this process only.

The library's table of imports gets another address. It is for libraries that open what they should not and have no
setting for it, and does the same as LD_PRELOAD, without a compiled library or a restart. `FORGE_INTERPOSE=0` switches
it off; docs/security.md lists the replaced functions, the reasons, and what is lost without them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)
Function = Any  # a ctypes function or pointer
SWITCH = "FORGE_INTERPOSE"  # environment variable
MAPS = Path("/proc/self/maps")

# Relocation types that hold the address of an imported function: x86-64 and aarch64.
_IMPORTS = {6, 7, 1025, 1026}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Replacement(NamedTuple):
    """The outcome of `replace`.

    names: the functions that were replaced, of those that were requested.
    restore: restores the original functions.
    """

    names: frozenset[str]
    restore: Callable[[], None]


def replace(library: str, functions: dict[str, Function], lost: str | None = None) -> Replacement:
    """Replace functions that a library imports by ctypes callbacks.

    Args:
        library: a part of its path.
        functions: by the name of the import. They must live as long as the process, or until they are restored.
        lost: the protection that is missing if a function is not replaced, for a warning; None: no warning.
    """
    originals: dict[int, int] = {}
    names: set[str] = set()
    reason = "it imports them in another way"
    off = os.environ.get(SWITCH) == "0" or not MAPS.exists()
    try:
        if off:
            raise OSError(f"{SWITCH} is 0, or this is not Linux")
        path, base = _loaded(library)
        for name, function in functions.items():
            address = ctypes.cast(function, ctypes.c_void_p).value
            for slot in imports(path, name.encode()):
                originals[base + slot] = _write(base + slot, address)
                names.add(name)
    except (OSError, ValueError, struct.error, StopIteration) as error:
        reason = str(error)  # another build or platform, or switched off
    remaining = sorted(functions.keys() - names)
    if remaining:
        level = logging.DEBUG if off or lost is None else logging.WARNING
        log.log(level, "%s of %s: not replaced (%s): %s", ", ".join(remaining), library, reason, lost or "")

    def restore() -> None:
        for slot, address in originals.items():
            _write(slot, address)

    return Replacement(frozenset(names), restore)


def _write(slot: int, address: int | None) -> int:
    """Write an address to a slot, which the loader may have made read-only; return the previous address."""
    page = slot - slot % mmap.PAGESIZE
    read_only = not _writable(slot)
    if read_only and _libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "its table of imports cannot be written")
    target = ctypes.c_void_p.from_address(slot)
    previous = target.value
    target.value = address
    if read_only:  # otherwise the loader, or the library's data in the same page, still needs to write
        _libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ)
    return previous or 0


def _maps() -> list[str]:
    return MAPS.read_bytes().decode(errors="surrogateescape").splitlines()


def _writable(address: int) -> bool:
    for line in _maps():
        first, _, fields = line.partition("-")
        end, mode, *_ = fields.split()
        if int(first, 16) <= address < int(end, 16):
            return "w" in mode
    return False


def _loaded(library: str) -> tuple[str, int]:
    """Return the file of a library, and the address in memory that its own addresses are relative to."""
    for line in _maps():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and library in fields[5] and int(fields[2], 16) == 0:
            fixed = _head(fields[5])[16:18] == b"\x02\0"  # an executable with absolute addresses
            return fields[5], 0 if fixed else int(fields[0].partition("-")[0], 16)
    raise OSError("it is not loaded")


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(64)


def imports(path: str, name: bytes) -> Iterator[int]:
    """Yield the slots of an ELF file that hold the address of an imported function, relative to its load address."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError("it is not an ELF file of 64 bits, little-endian")
        # The program headers (System V ABI, "Program Loading"): kind 1 maps a part of the file, kind 2 is the dynamic
        # section.
        (start,) = struct.unpack_from("<Q", image, 32)
        size, number = struct.unpack_from("<HH", image, 54)
        headers = [struct.unpack_from("<IIQQQQ", image, start + index * size) for index in range(number)]
        segments = [(address, offset, length) for kind, _, offset, address, _, length in headers if kind == 1]

        def position(address: int) -> int:
            return next(offset + address - start for start, offset, size in segments if 0 <= address - start < size)

        dynamic, length = next((offset, length) for kind, _, offset, _, _, length in headers if kind == 2)
        tags = dict(struct.iter_unpack("<QQ", image[dynamic : dynamic + length]))
        # Tags of the dynamic section: 5 names, 6 symbols, 7 and 23 tables of relocations, 8 and 2 the tables' sizes.
        strings = position(tags[5])
        symbols = position(tags[6])
        for table, table_size in ((7, 8), (23, 2)):
            if table not in tags:
                continue
            first = position(tags[table])
            for slot, info, _ in struct.iter_unpack("<QQq", image[first : first + tags[table_size]]):
                if info & 0xFFFFFFFF in _IMPORTS:
                    (start,) = struct.unpack_from("<I", image, symbols + 24 * (info >> 32))
                    text = strings + start
                    if image[text : text + len(name) + 1] == name + b"\0":
                        yield slot
