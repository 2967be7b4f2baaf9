"""Let threads that need the interpreter while it exits wait for ever, as Python 3.14 and later do.

Before 3.14, Python ends such a thread by `pthread_exit`, which unwinds its stack like an exception. A frame of Rust or
C++ that catches everything, as in Monarch's threads, turns that into "FATAL: exception not rethrown": the process
aborts although its work was done.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import sys
from functools import cache

from ...system.interpose import replace

log = logging.getLogger(__name__)

# A loop around the system call that waits for a signal: pause, on aarch64 ppoll without files and time limit.
_WAITS = {
    "x86_64": "b8 22 00 00 00  0f 05  eb f7",
    "aarch64": "000080d2 010080d2 020080d2 030080d2 280980d2 010000d4 faffff17",
}
_pages: list[object] = []  # memory that threads execute, which must outlive them


@cache
def let_threads_wait() -> None:
    """Make threads of this process wait at exit. Call it once, when foreign threads have started."""
    code = _WAITS.get(platform.machine())
    if code is None or sys.version_info >= (3, 14):
        return
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError as error:
        log.debug("threads are ended at exit: no executable memory: %s", error)  # a hardened kernel
        return
    page.write(bytes.fromhex(code))
    start = ctypes.c_char.from_buffer(page)
    _pages.extend([page, start])
    wait = ctypes.c_void_p(ctypes.addressof(start))
    # Python calls pthread_exit from its shared library, or from the executable where it is linked statically.
    libraries = "/libpython3.", os.path.realpath(sys.executable)
    if not any([replace(library, {"pthread_exit": wait}).names for library in libraries]):
        log.debug("pthread_exit of Python was not replaced: this process may report an abort at its exit")
