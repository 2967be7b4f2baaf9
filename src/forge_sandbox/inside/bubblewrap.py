"""`bwrap` in place of our namespaces, where it has permissions that we lack."""

from __future__ import annotations

import os
import sys

from . import confine, namespaces, program, wire
from .jail import DEVICES, links_to, readable_paths
from .syscalls import die_with_parent, prctl
from .wire import Header, Settings

# Files of /proc that describe the machine. ("/proc/cmdline", "/proc/version", "/proc/keys", "/proc/key-users",
# "/proc/config.gz")
_MACHINE_FILES = ("/proc/cmdline", "/proc/version", "/proc/keys", "/proc/key-users", "/proc/config.gz")


def execute(settings: Settings, modules: dict[str, str], source: bytes, cells: int | None, setup: int) -> None:
    """Execute bwrap with a program, or with a session on the socket `cells`."""
    try:
        # A separate group, which is killed as one.
        os.setsid()
        paths = readable_paths(settings)
        # Root would be root inside too; bwrap maps the user that calls it.
        if not os.geteuid():
            confine.become_user(namespaces.NOBODY)
        die_with_parent()
        # The program is in memory, not in a file: nothing of it is on a disk that others read.
        header = {"modules": modules, "main": "bubblewrap", "settings": settings, "cells": cells, "setup": setup}
        message = os.memfd_create("message")
        os.write(message, wire.pack(header, source))
        os.lseek(message, 0, os.SEEK_SET)
        for descriptor in (message, setup, *(() if cells is None else (cells,))):
            os.set_inheritable(descriptor, True)
        words = [settings["bubblewrap"], "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1"]
        words += ["--clearenv", "--cap-drop", "ALL"]
        # Read-only, apart from the devices: /dev/null and the like must be written.
        for path in paths:
            words += ["--dev-bind" if path in DEVICES else "--ro-bind", path, path]
        # Links of the system, such as /lib to /usr/lib: a library is looked up by that name.
        for link, target in links_to(settings).items():
            if not any(link.startswith(f"{path}/") for path in paths):
                words += ["--symlink", target, link]
        words += ["--proc", "/proc"]
        # These files of /proc tell about the machine.
        for path in filter(os.path.exists, _MACHINE_FILES):
            words += ["--ro-bind", "/dev/null", path]
        words += ["--remount-ro", "/proc", "--remount-ro", "/", "--chdir", "/", "--"]
        words += [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8"]
        os.execv(words[0], [*words, "-c", settings["boot"], str(message)])
    except BaseException as error:
        os.write(setup, f"{type(error).__name__}: {error}".encode())
        os._exit(confine.SETUP_FAILED)


def main(message: int, header: Header, source: bytes) -> None:
    """Inside bwrap: confine further, then run the program."""
    os.close(message)
    # The first process inside must stay as init: it collects processes whose parents have ended.
    program_pid = os.fork()
    if program_pid:
        _run_as_init(program_pid)
    settings = header["settings"]
    cells = header["cells"]
    sys.path.extend(settings["path"])

    def run() -> None:
        if cells is None:
            program.run_program(source.decode("utf-8", "surrogatepass"))
        else:
            program.run_cells(cells)

    confine.confine(settings, None, () if cells is None else (cells,), run, header["setup"])


def _run_as_init(program_pid: int) -> None:
    """Be pid 1, which ignores signals, so that the program is not; exit with its status."""
    prctl(confine.DUMPABLE, 0)  # the program may not access its memory and files
    confine.close_all_but()
    for descriptor in range(3):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program_pid:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
