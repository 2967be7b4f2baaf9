"""Launcher of a forked process: Monarch starts it; it forwards signals to the fork, and ends as the fork does.

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
    """Ask the fork server to fork a process that runs this process's program; return the process id.

    Returns 0 if the server cannot fork, or has ended. The process ends when the connection is closed.

    Args:
        connection: a new UNIX socket.
        address: path of the server's socket.
        program: name of the module to run as the main program.
    """
    # Read back by `forkserver.read_request`: the length, with four open files, then fields that are separated by 0
    # bytes.
    limits = b",".join(b"%d:%d:%d" % (limit, *resource.getrlimit(limit)) for limit in LIMITS)
    environment = [name + b"=" + value for name, value in os.environb.items()]
    request = b"\0".join([program.encode(), limits, *environment])

    try:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        connection.connect(address)
        socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2, folder])
        os.close(folder)
        connection.sendall(request)
    except OSError:  # the server does not listen, or has ended
        return 0

    return int.from_bytes(receive_bytes(connection, 4), "little")


def receive_bytes(connection: socket.socket, length: int) -> bytes:
    """Return the next `length` bytes of a connection; fewer if the other side closes it before, or reading fails."""
    received = b""
    with suppress(OSError):
        while len(received) < length:
            if not (chunk := connection.recv(length - len(received))):
                break
            received += chunk
    return received


def main(address: str, program: str) -> None:
    """Run a program in a fork of the server at `address`, and exit with its status; without a fork, run it in this
    process.

    Args:
        address: path of the server's socket.
        program: name of the module to run as the main program.
    """
    with open("/proc/self/comm", "w") as name:
        name.write("forge-launcher")

    # Signals wait until they can be forwarded: the fork may run before this process continues.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = ask_server(connection, address, program)
    if not pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.execv(sys.executable, [sys.executable, "-m", program])

    status = follow_process(connection, pid)

    # The parent of this process sees the exit code of the fork, or the signal that ended it.
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the fork has dumped its core already
    os.kill(os.getpid(), os.WTERMSIG(status))


def follow_process(connection: socket.socket, pid: int) -> int:
    """Forward this process's signals to process `pid` until that ends; return its status, as `os.wait` gives it.

    The process sends its status over `connection` when its program ends. Without one it counts as killed by SIGKILL.
    """
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        for signal_number in FORWARDED:
            signal.signal(signal_number, lambda signal_number, frame: signal.pidfd_send_signal(process, signal_number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

        # A signal that arrives just before the call does not interrupt it: its handler runs when the time is over.
        while not select.select([process], [], [], 1.0)[0]:
            continue
        connection.setblocking(False)  # a child of the process may keep the other end of the connection open
        status = receive_bytes(connection, 4)
        if len(status) == 4:
            return struct.unpack("=i", status)[0]
    return signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
