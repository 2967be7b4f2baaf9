"""Launcher of a standby process: Monarch starts it, and it mirrors the process's signals and exit status.

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


def ask(
    listener: socket.socket, address: str, program: str, environment: dict[bytes, bytes], standard_input: int = 0
) -> int | None:
    """Ask the process at an address to run a program as this process would, or to fork one that does.

    Args:
        listener: not connected yet. The process ends when the connection is closed.
        environment, standard_input: those of the process; limits, folder and the other streams are this one's.

    Returns:
        its process id; 0 if it rejects the request, None if it is gone.
    """
    limits = b",".join(b"%d:%d:%d" % (number, *resource.getrlimit(number)) for number in LIMITS)
    request = b"\0".join([program.encode(), limits, *(name + b"=" + value for name, value in environment.items())])
    try:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        listener.connect(address)
        socket.send_fds(listener, [len(request).to_bytes(4, "little")], [standard_input, 1, 2, folder])
        os.close(folder)
        listener.sendall(request)
    except OSError:  # it does not listen, or ended
        return None
    reply = receive(listener, 4)
    return int.from_bytes(reply, "little") if len(reply) == 4 else None


def receive(connection: socket.socket, length: int) -> bytes:
    """Read `length` bytes; fewer if the other side ended."""
    received = b""
    with suppress(OSError):
        while len(received) < length:
            chunk = connection.recv(length - len(received))
            if not chunk:
                break
            received += chunk
    return received


def main(address: str, count: str, program: str) -> None:
    """Become a standby process at `address`.0, `address`.1 and so on; run the program if none is available."""
    with open("/proc/self/comm", "w") as name:
        name.write("forge-launcher")
    for number in range(int(count)):
        standby = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        pid = ask(standby, f"{address}.{number}", program, dict(os.environb))
        if pid:
            break
        standby.close()  # another launcher has it
    else:
        os.execv(sys.executable, [sys.executable, "-m", program])
    status = follow(standby, pid)
    # A parent sees the same exit status, or the same signal, as of the process itself.
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the process has dumped its core already
    os.kill(os.getpid(), os.WTERMSIG(status))


def follow(standby: socket.socket, pid: int) -> int:
    """Forward signals to a process until it ends. Return its status; SIGKILL if its program did not report one."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        for number in FORWARDED:
            signal.signal(number, lambda number, frame: signal.pidfd_send_signal(process, number))
        select.select([process], [], [])
        standby.setblocking(False)  # a child of the process may hold its end of the connection
        status = receive(standby, 4)
        if len(status) == 4:
            return struct.unpack("=i", status)[0]
    return signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
