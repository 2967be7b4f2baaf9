"""Standby process: it is up before Monarch starts it.

Monarch 0.7 loses a process that has not called back 30 s after its start: the process comes up, and the wait for it
never ends. On a busy machine, or with a slow `sitecustomize`, that is too short for Python and its imports. So the
controller starts the process itself, waits for as long as it takes, and then has Monarch start a launcher of a few
milliseconds (`forklauncher.py`), in whose place the process runs.

The process does not outlive its parents: the kernel kills it once the controller or the launcher has ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
from contextlib import suppress
from typing import NamedTuple

from ...system.interpose import replace
from ..monarch_names import MAIN, MAPPED, OPTIONAL
from .forklauncher import receive

PROGRAM = "forge.runtime.controller.child"
ADDRESS = "FORGE_STANDBY"
# The program's imports once Monarch waits for it.
LIBRARIES = (
    "forge.runtime.controller._monarch",
    "forge.runtime.controller.actor_host",
    MAIN,
)
REQUEST_TIMEOUT = 10.0  # seconds; a launcher sends its request at once
# Signals that terminals and schedulers send to every process of a run: its controller handles them.
HELD = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class ForkRequest(NamedTuple):
    """A fork request: program, resource limits, environment, and the handles of standard input, output, error and the
    working directory."""

    program: str
    limits: list[tuple[int, int, int]]
    environment: dict[bytes, bytes]
    handles: list[int]


def read_request(launcher: socket.socket) -> ForkRequest | None:
    """Read a launcher's request; None if it ended."""
    launcher.settimeout(REQUEST_TIMEOUT)
    handles: list[int] = []
    try:
        length, handles, _, _ = socket.recv_fds(launcher, 4, 4)
        program, limits, *variables = receive(launcher, int.from_bytes(length, "little")).split(b"\0")
        environment = dict(variable.split(b"=", 1) for variable in variables)
        quantities = [tuple(map(int, limit.split(b":"))) for limit in limits.split(b",")]
        if len(handles) == 4:
            return ForkRequest(program.decode(), quantities, environment, handles)  # type: ignore[arg-type]
    except (OSError, ValueError):  # the launcher ended
        pass
    # The request is incomplete: without a process its handles would stay open.
    for handle in handles:
        os.close(handle)
    return None


def become(request: ForkRequest) -> None:
    """Take the launcher's environment, limits, folder and streams, in the child that replaces it."""
    *streams, folder = request.handles
    for number, handle in enumerate(streams):
        os.dup2(handle, number)
        os.close(handle)
    os.fchdir(folder)
    os.close(folder)
    for limit, soft, hard in request.limits:
        resource.setrlimit(limit, (soft, hard))
    os.environ.clear()
    os.environb.update(request.environment)
    tempfile.tempdir = None  # TMPDIR may differ
    if not sys.flags.safe_path:
        with suppress(FileNotFoundError):  # the folder was removed
            sys.path[0] = os.getcwd()
    # Forks of one server would otherwise draw the same numbers.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def end_with(connection: socket.socket) -> None:
    """Have the kernel kill this process when the other side of a connection, which never sends, ends."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    state = select.poll()
    state.register(connection, select.POLLIN | select.POLLHUP)
    if state.poll(0):  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def stand_by() -> None:
    """Import the libraries of the program, report to the controller, and run in place of the first launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # A signal that is ignored stays so in programs that a component starts, and SIGTERM is how it ends them.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    # The controller's end of this connection is standard input, which becomes the launcher's.
    controller = socket.socket(fileno=os.dup(0))
    address = os.environ[ADDRESS]
    end_with(controller)
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in OPTIONAL:
        with suppress(ImportError):  # another version of Monarch
            importlib.import_module(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        controller.sendall(b"y")
        request = None
        while request is None:
            launcher, _ = listener.accept()
            request = read_request(launcher)
        os.unlink(address)
    become(request)
    launcher.settimeout(None)
    launcher.sendall(os.getpid().to_bytes(4, "little"))
    end_with(launcher)
    # Monarch would have the kernel end this process with its parent, which may be the fork server; its setting for this
    # prints a line. The function that it calls instead also returns 0, and does nothing.
    replace(MAPPED, {"prctl": ctypes.CDLL(None).sched_yield}, "this process ends with the fork server")
    sys.argv = [request.program]
    status = 1 << 8
    try:
        runpy.run_module(request.program, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ending:
        status = (ending.code if isinstance(ending.code, int) else int(ending.code is not None)) << 8
        raise
    finally:
        launcher.sendall(struct.pack("=i", status))


if __name__ == "__main__":
    stand_by()
