"""What Monarch starts where a process is forked: asks the fork server for it, and lives and ends as it does.

It is run by its path, without forge's package and without site-packages, so that it starts in milliseconds.
"""

import os
import resource
import signal
import socket
import sys
from contextlib import suppress

LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]


def ask(server: socket.socket, address: str, program: str) -> bool:
    """Whether the server forked a process with this one's environment, limits, folder and standard streams."""
    limits = b",".join(b"%d:%d:%d" % (number, *resource.getrlimit(number)) for number in LIMITS)
    words = [program.encode(), limits, *(name + b"=" + value for name, value in os.environb.items())]
    request = b"\0".join(words)
    try:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        server.connect(address)
        socket.send_fds(server, [len(request).to_bytes(4, "little")], [0, 1, 2, folder])
        os.close(folder)
        server.sendall(request)
        return server.recv(1) == b"y"
    except OSError:  # there is no server, or it ended
        return False


def forward(server: socket.socket, number: int) -> None:
    """Have the server send a signal to the fork."""
    with suppress(OSError):  # the server ended, its forks with it: `main` finds out
        server.send(bytes([number]))


def main(address: str, program: str) -> None:
    """Ask the fork server at this address for a process, and live as long as it does."""
    with open("/proc/self/comm", "w") as name:
        name.write("forge-launcher")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not ask(server, address, program):
        os.execv(sys.executable, [sys.executable, "-m", program])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: forward(server, number))
    try:
        answer = server.recv(4)
    except ConnectionResetError:
        answer = b""
    status = int.from_bytes(answer, "little") if answer else signal.SIGKILL  # the server ended, its forks with it
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the fork has left its own
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
