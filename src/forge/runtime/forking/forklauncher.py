"""What Monarch starts for a process that stands by: hands over its place, and lives and ends as that process does.

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
    """Request that the process at an address runs a program as this process would, or forks one that does.

    Args:
        listener: not connected yet. It stays connected for as long as that process is wanted.
        environment, standard_input: those of the process; limits, folder and the other streams are this one's.

    Returns:
        its process id; 0 if it does not, None if nothing answers.
    """
    limits = b",".join(b"%d:%d:%d" % (number, *resource.getrlimit(number)) for number in LIMITS)
    request = b"\0".join([program.encode(), limits, *(name + b"=" + value for name, value in environment.items())])
    try:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        listener.connect(address)
        socket.send_fds(listener, [len(request).to_bytes(4, "little")], [standard_input, 1, 2, folder])
        os.close(folder)
        listener.sendall(request)
    except OSError:  # nothing listens, or it ended
        return None
    answer = receive(listener, 4)
    return int.from_bytes(answer, "little") if len(answer) == 4 else None


def receive(connection: socket.socket, length: int) -> bytes:
    """So many bytes; fewer where the other side ended."""
    received = b""
    with suppress(OSError):
        while len(received) < length and (more := connection.recv(length - len(received))):
            received += more
    return received


def main(address: str, count: str, program: str) -> None:
    """Become one of the processes that stand by at `address`.0, `address`.1 and so on; a program where none does."""
    with open("/proc/self/comm", "w") as name:
        name.write("forge-launcher")
    for number in range(int(count)):
        standby = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if pid := ask(standby, f"{address}.{number}", program, dict(os.environb)):
            break
        standby.close()  # another launcher has it
    else:
        os.execv(sys.executable, [sys.executable, "-m", program])
    status = follow(standby, pid)
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the process has left its own
    os.kill(os.getpid(), os.WTERMSIG(status))


def follow(standby: socket.socket, pid: int) -> int:
    """Pass signals on to a process until it ends; its exit status, SIGKILL for any end but that of its program."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        for number in FORWARDED:
            signal.signal(number, lambda number, frame: signal.pidfd_send_signal(process, number))
        select.select([process], [], [])
        standby.setblocking(False)  # a process that this one has forked may have its end of the connection
        if len(status := receive(standby, 4)) == 4:
            return struct.unpack("=i", status)[0]
    return signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
