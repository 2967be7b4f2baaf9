"""The zygote, the process from which keepers are forked: a new interpreter with all imports and an empty environment.

It does not read requests, which programs could otherwise find in their memory: each keeper reads its own request.
"""

import gc
import importlib
import os
import select
import signal
import socket
import sys

from . import keeper, limits, namespaces, wire
from .syscalls import check_result, die_with_parent, libc
from .wire import Settings

# Modules that many programs import, so that they are imported once, and not by each program.
_PRELOADED = (
    *("math", "re", "json", "random", "string", "collections", "itertools", "functools", "operator", "heapq", "bisect"),
    *("copy", "datetime", "decimal", "fractions", "statistics", "typing", "dataclasses", "enum", "io", "textwrap"),
    *("contextlib", "abc", "array", "queue", "threading", "traceback", "linecache", "time", "hashlib", "struct"),
)
_CHECK_INTERVAL = 1.0  # seconds between checks that the parent is alive


def main(control: int, settings: Settings) -> None:
    """Answer requests until the socket is closed; called by the program in `forge_sandbox.worker`.

    Args:
        control: the socket's descriptor.
    """
    os.set_inheritable(control, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)

    try:
        limits.open_proc()
        if settings["level"] == "namespaces":
            namespaces.enter_namespaces(settings.get("network") != "host")
        _follow_parent(control)
        if "network" in settings:
            _serve_command(control, settings)
        else:
            _serve_requests(control, settings)
    except (OSError, ImportError, EOFError) as error:
        os.write(control, wire.pack_message({"failed": f"{type(error).__name__}: {error}"}))
        sys.exit(1)


def _follow_parent(control: int) -> None:
    """Fork, and return in the child only; this process kills the child when its own parent exits.

    That the socket is closed then is not enough: another child of the parent may have inherited it.
    """
    parent = os.getppid()
    child = os.fork()
    if not child:
        die_with_parent()
        return
    os.close(control)
    exited = os.pidfd_open(child)
    while not select.select([exited], [], [], _CHECK_INTERVAL)[0]:
        if os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)


def _serve_requests(control: int, settings: Settings) -> None:
    # Import all modules, then fork a keeper for each request, one after the other.
    sys.path.extend(settings["path"])
    namespace = None
    if settings["level"] == "namespaces":
        namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        settings["paths"], settings["links"] = namespaces.readable_paths(settings), namespaces.links_to(settings)
        namespaces.new_root(settings["paths"], settings["links"])

    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    for name in (*_PRELOADED, *settings["imports"]):
        importlib.import_module(name)
    # Frozen objects are not touched by the garbage collector, so that forked processes share their pages.
    gc.collect()
    gc.freeze()

    with socket.socket(fileno=control) as requests:
        requests.sendall(wire.pack_message({}))
        # Only a peek: the keeper reads the request.
        while requests.recv(1, socket.MSG_PEEK):
            status = _fork_keeper(control, settings, namespace)
            if status:
                raise OSError(f"the parent process of a program exited with status {os.waitstatus_to_exitcode(status)}")
            requests.sendall(wire.pack_message({"over": True}))


def _serve_command(control: int, settings: Settings) -> None:
    """Run one command as its keeper, in this process.

    If the command's port is set, a socket that listens at it is opened here and sent to the caller, which answers its
    connections: a socket belongs to the network namespace in which it was opened.
    """
    os.umask(0o022)
    listeners = []
    if settings["level"] == "namespaces":
        namespaces.new_root(namespaces.readable_paths(settings), namespaces.links_to(settings), settings["writable"])
        if settings["network"] == "gateway":
            namespaces.open_loopback()
        if settings["port"] is not None:
            listeners.append(socket.create_server(("127.0.0.1", settings["port"]), backlog=128).detach())
    with socket.socket(fileno=os.dup(control)) as answers:
        socket.send_fds(answers, [wire.pack_message({})], listeners)
    keeper.keep_program(control, settings)


def _fork_keeper(control: int, settings: Settings, namespace: int | None) -> int:
    """Fork the process that starts and limits one program, wait for its end, and return its `os.waitpid` status.

    Args:
        namespace: a descriptor of this process's namespace of processes; None: the keeper gets no new one.
    """
    # The next fork, and only this one, is in the new namespace.
    if namespace is not None:
        check_result(libc.unshare(namespaces.NEW_PID), "unshare (processes)")
    pid = os.fork()
    if not pid:
        status = 1
        try:
            die_with_parent()
            if namespace is not None:
                namespaces.private_mounts(settings["file_mb"], settings["paths"], settings["links"])
            keeper.keep_program(control, settings)
            status = 0
        except EOFError:  # the socket is closed
            status = 0
        except BaseException as error:
            os.write(control, wire.pack_message({"failed": f"{type(error).__name__}: {error}"}))
        finally:
            os._exit(status)

    if namespace is not None:
        check_result(libc.setns(namespace, namespaces.NEW_PID), "setns (processes)")
    return os.waitpid(pid, 0)[1]
