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

from .credentials import read_secret
from .processes import check_words

START_TIMEOUT = 120.0  # seconds for a worker to listen: it counts its GPUs first


class NotStarted(RuntimeError):
    """A worker did not start; the message names the machine."""


@contextmanager
def start_workers(
    hosts: Sequence[str], folder: str, python: str = sys.executable, ssh: Sequence[str] = ("ssh", "-o", "BatchMode=yes")
) -> Iterator[dict[str, str]]:
    """Start a worker on each machine by ssh, and yield the environment variables of a controller that uses them.

    The workers end with the block, or if this process ends in any way, as ssh then closes their standard input.

    Args:
        hosts: as ssh takes them: name, user@name.
        folder: the working directory of the workers, on each machine.
        python: the Python of the workers, on each machine.
        ssh: the command before the host.

    Raises:
        NotStarted: one of them did not start.
        ValueError: a host, the folder or the Python is invalid.
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
                start_new_session=True,  # not reached by Ctrl-C, so that the controller ends first
            )
            started[host] = process
            # By standard input: other users can read the arguments of a process.
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it ended, which `_read_address` reports
                process.stdin.write(f"{secret}\n")

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
    """Check the arguments of `start_workers`. ValueError: a host, the folder or the Python is invalid."""
    for host in hosts:
        check_host(host)
    check_words([folder, python])
    if python.startswith("-"):
        raise ValueError(f"--python {python[:80]!a} would be an option of the shell: give the path of a Python")


def check_host(host: str) -> None:
    """Check that a host is a name, user@name or an address.

    Others are dangerous: ssh may read them as options, and a ProxyCommand may pass them to a shell.

    Raises:
        ValueError: it is none of these.
    """
    allowed = re.fullmatch(r"(ssh://)?([\w.+][\w.+-]*@)?(\[[\w:.%]+\]|[\w.:%][\w.:%-]*)", host, re.ASCII)
    if allowed is None or len(host) > 255:
        raise ValueError(f"{host[:80]!a} cannot be a host of --hosts: write name, user@name or an address")


def _read_address(host: str, process: subprocess.Popen) -> str:
    """Return the address that a worker prints when it listens. NotStarted: it printed none in time."""
    lines: list[str] = []

    # Read in a thread: a read has no timeout, and ssh may wait forever for a password.
    reader = threading.Thread(
        target=lambda file: lines.append(file.readline().strip()), args=(process.stdout,), daemon=True
    )
    reader.start()
    reader.join(START_TIMEOUT)
    if not lines or not lines[0]:
        outcome = f"ended with {process.wait(10)}" if lines else f"said nothing within {START_TIMEOUT:g} s"
        raise NotStarted(f"the worker on {host} {outcome}: see its output above, and try `ssh {host} true`")
    return lines[0]
