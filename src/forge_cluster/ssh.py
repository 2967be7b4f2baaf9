"""`forge launch ssh`: workers on machines that ssh reaches, for the duration of one run."""

import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from .credentials import read_secret
from .processes import check_words

START_TIMEOUT = 120.0  # seconds for a worker to listen: it counts its GPUs first


class NotStarted(RuntimeError):
    """A worker did not start; names the machine and quotes its output."""


@contextmanager
def start_workers(
    hosts: Sequence[str], folder: str, python: str = sys.executable, ssh: Sequence[str] = ("ssh", "-o", "BatchMode=yes")
) -> Iterator[dict[str, str]]:
    """Start a worker on each machine; yields the environment of a controller that uses them. The workers end with the
    block, however this process ends: ssh closes their standard input.

    Args:
        hosts: as ssh understands them: name, user@name.
        folder, python: the working directory and the Python of the workers, on each machine.

    Raises:
        NotStarted: one of them did not start. ValueError: a host, the folder or the program is invalid.
    """
    check_words_of_ssh(hosts, folder, python)
    secret = read_secret() or secrets.token_hex(32)
    path = os.environ.get("PYTHONPATH", "")
    worker = f"cd -- {shlex.quote(folder)} && PYTHONPATH={shlex.quote(path)} exec {shlex.quote(python)} -m forge worker"
    started: dict[str, subprocess.Popen] = {}

    try:
        for host in hosts:
            command = [*ssh, "--", host, f"{worker} --listen :0 --stdin"]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                start_new_session=True,  # Ctrl-C is for the controller, which ends the workers' work
            )
            started[host] = process
            assert process.stdin is not None  # the secret must not be among the arguments, which other users can read
            try:
                process.stdin.write(f"{secret}\n")
            except BrokenPipeError:
                continue  # it ended, which is reported below

        addresses = [_read_address(host, process) for host, process in started.items()]
        yield {"FORGE_HOSTS": ",".join(addresses), "FORGE_SECRET": secret}
    finally:
        for process in started.values():
            with suppress(BrokenPipeError):  # it ended before it read the secret
                assert process.stdin is not None
                process.stdin.close()
        for process in started.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def check_words_of_ssh(hosts: Sequence[str], folder: str, python: str) -> None:
    """Raise ValueError if a host is invalid, or the folder or Python cannot be a word of a command."""
    for host in hosts:
        check_host(host)
    check_words([folder, python])
    if python.startswith("-"):
        raise ValueError(f"--python {python[:80]!a} would be an option of the shell: give the path of a Python")


def check_host(host: str) -> None:
    """Raise ValueError for a host that ssh would read as an option, or that a ProxyCommand would pass to a shell."""
    allowed = re.fullmatch(r"(ssh://)?([\w.+][\w.+-]*@)?(\[[\w:.%]+\]|[\w.:%][\w.:%-]*)", host, re.ASCII)
    if allowed is None or len(host) > 255:
        raise ValueError(f"{host[:80]!a} cannot be a host of --hosts: write name, user@name or an address")


def _read_address(host: str, process: subprocess.Popen) -> str:
    """Return the address that a worker prints when it listens."""
    lines: list[str] = []

    def read_line(file: IO[str]) -> None:
        lines.append(file.readline().strip())

    assert process.stdout is not None
    # Read in a thread: a read has no timeout, and ssh may wait forever for a password.
    reader = threading.Thread(target=read_line, args=(process.stdout,), daemon=True)
    reader.start()
    reader.join(START_TIMEOUT)
    if not lines or not lines[0]:
        outcome = f"ended with {process.wait(10)}" if lines else f"said nothing within {START_TIMEOUT:g} s"
        raise NotStarted(f"the worker on {host} {outcome}: see its output above, and try `ssh {host} true`")
    return lines[0]
