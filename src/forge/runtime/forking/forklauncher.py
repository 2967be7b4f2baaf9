"""Launcher of a forked process: Monarch starts it, and it mirrors the process's signals and exit status.

It is run by its path, without forge's package and without site-packages, so that it starts in milliseconds.
"""

import os
import resource
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def ask_server(connection: socket.socket, address: str, program: str) -> int:
    """Ask the server at an address to fork a process that runs a program as this one would.

    The process ends when the connection is closed. Returns its id, 0 if the server does not fork or is gone.
    """
    limits = b",".join(b"%d:%d:%d" % (number, *resource.getrlimit(number)) for number in LIMITS)
    variables = (name + b"=" + value for name, value in os.environb.items())
    request = b"\0".join([program.encode(), limits, *variables])
    try:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        connection.connect(address)
        socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2, folder])
        os.close(folder)
        connection.sendall(request)
    except OSError:  # it does not listen, or ended
        return 0
    return int.from_bytes(receive_bytes(connection, 4), "little")


def receive_bytes(connection: socket.socket, length: int) -> bytes:
    """Read `length` bytes; fewer if the other side ended."""
    received = b""
    with suppress(OSError):
        while len(received) < length:
            chunk = connection.recv(length - len(received))
            if not chunk:
                break
            received += chunk
    return received


def main(address: str, program: str) -> None:
    """Have a program run in a fork; run it here if there is none."""
    with open("/proc/self/comm", "w") as name:
        name.write("forge-launcher")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = ask_server(connection, address, program)
    if not pid:
        os.execv(sys.executable, [sys.executable, "-m", program])
    status = follow_process(connection, pid)
    # A parent sees the same exit status, or the same signal, as of the process itself.
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the process has dumped its core already
    os.kill(os.getpid(), os.WTERMSIG(status))


def follow_process(connection: socket.socket, pid: int) -> int:
    """Forward signals to a process until it ends. Return its status; SIGKILL if its program did not report one."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        for number in FORWARDED:
            signal.signal(number, lambda number, frame: signal.pidfd_send_signal(process, number))
        select.select([process], [], [])
        connection.setblocking(False)  # a child of the process may hold its end of the connection
        status = receive_bytes(connection, 4)
        if len(status) == 4:
            return struct.unpack("=i", status)[0]
    return signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
