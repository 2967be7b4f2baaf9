"""`forge launch ssh`: workers on machines that ssh reaches, for the duration of one run."""

import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from . import processes
from .credentials import SECRET, read_secret


@contextmanager
def start_workers(
    hosts: Sequence[str], folder: str, python: str = sys.executable, ssh: Sequence[str] = ("ssh", "-o", "BatchMode=yes")
) -> Iterator[dict[str, str]]:
    """Start a worker on each machine by ssh, and yield the environment variables of a controller that uses them.

    The workers end with the block, or if this process ends in any way.

    Args:
        hosts: as ssh takes them: name, user@name.
        folder: the working directory of the workers, on each machine.
        python: the Python of the workers, on each machine.
        ssh: the command before the host.

    Raises:
        NotStarted: one of them did not start.
        ValueError: a host or the Python is invalid.
    """
    check_words_of_ssh(hosts, python)
    secret = read_secret() if os.environ.get(SECRET) else secrets.token_hex(32)
    path = os.environ.get("PYTHONPATH", "")
    worker = f"cd -- {shlex.quote(folder)} && PYTHONPATH={shlex.quote(path)} exec {shlex.quote(python)} -m forge worker"
    commands = {host: [*ssh, "--", host, f"{worker} --listen :0 --stdin"] for host in hosts}
    with processes.start_workers(commands, secret) as addresses:
        yield {"FORGE_HOSTS": ",".join(addresses), "FORGE_SECRET": secret}


def check_words_of_ssh(hosts: Sequence[str], python: str) -> None:
    """Check the arguments of `start_workers`: each host is a name, user@name or an address.

    Other hosts are dangerous: ssh may read them as options, and a ProxyCommand may pass them to a shell.

    Raises:
        ValueError: a host or the Python is invalid.
    """
    for host in hosts:
        allowed = re.fullmatch(r"(ssh://)?([\w.+][\w.+-]*@)?(\[[\w:.%]+\]|[\w.:%][\w.:%-]*)", host, re.ASCII)
        if allowed is None or len(host) > 255:
            raise ValueError(f"{host[:80]!a} is not a valid host in --hosts: write NAME, USER@NAME or an address")
    if python.startswith("-"):
        raise ValueError(f"--python {python[:80]!a} would be read as an option by the shell: give the path of a Python")
