"""Start of a run by launchers that start the same program on every machine, such as torchrun, mpirun or srun:

    FORGE_SECRET=... torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29400 \\
        -m forge_cluster.torchrun train CONFIG --training.steps 100

Rank 0 is the controller and has a worker, all others have a worker. It reads RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. The workers' addresses, and nothing else, are exchanged by torch.distributed's store.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from forge.system.addresses import join_address

from .credentials import read_secret
from .processes import run_as_child
from .wire import split
from .words import check_words

MEETING_TIMEOUT = timedelta(minutes=10)  # machines of one job may boot minutes apart
_HOST = re.compile(r"[\w.:%][\w.:%-]{0,254}", re.ASCII)
# Variables of the launcher, which the run must not see: it has its own ranks.
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Meeting(NamedTuple):
    """The meeting point of a launcher's ranks, and the number of this one."""

    rank: int
    world: int
    address: str
    port: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Meeting:
        """Read the variables of a launcher. ValueError: one is missing or invalid; names it."""
        numbers = []
        # Checked before they are used: a wrong launcher sets some of them, or to words.
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            text = environment.get(name, "")
            if re.fullmatch("[0-9]{1,9}", text) is None:
                raise ValueError(f"{name} is {text[:80]!a}, and must be a number: start this with torchrun or the like")
            numbers.append(int(text))
        rank, world, port = numbers
        if not (rank < world and 0 < port < 65536):
            raise ValueError(f"RANK {rank} of WORLD_SIZE {world} at MASTER_PORT {port} is not a rank: ranks begin at 0")
        address = environment.get("MASTER_ADDR", "")
        if _HOST.fullmatch(address) is None:
            raise ValueError(f"MASTER_ADDR is {address[:80]!a}, and must be a name or an address")
        return cls(rank, world, address, port)


def command_of_run(words: Sequence[str]) -> list[str]:
    """Return the command line of a run with these arguments. ValueError: one of them cannot be an argument."""
    check_words(words)
    return [sys.executable, "-m", "forge", *words]


def environment_of_run(hosts: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run on these workers, whose processes are not ranks of the launcher.

    Raises:
        ValueError: a rank has sent something that is not the address of one worker.
    """
    for rank, host in enumerate(hosts):
        try:
            name, port = split(host)
            valid = _HOST.fullmatch(name) is not None and join_address(name, port) == host
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"the worker of rank {rank} listens at {host[:80]!a}, which is not an address")
    inherited = {name: value for name, value in environment.items() if name not in RANKS}
    return {**inherited, "FORGE_HOSTS": ",".join(hosts), "FORGE_EXPECT_HOSTS": str(len(hosts))}


def main() -> int:
    """Start the worker of this rank, and at rank 0 the run; return its exit code."""
    import torch.distributed as dist

    try:
        meeting = Meeting.read(os.environ)
        run = command_of_run(sys.argv[1:])
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if "FORGE_SECRET" not in os.environ:
        if meeting.world > 1:
            raise SystemExit(
                "error: FORGE_SECRET is not set: set it to the same 32 characters or more on every machine"
            )
        os.environ["FORGE_SECRET"] = secrets.token_hex(32)
    if not os.environ["FORGE_SECRET"].isprintable():  # the worker reads it as a line
        raise SystemExit("error: FORGE_SECRET has a line break or a control character: remove it")
    # Before the ranks wait for one another.
    try:
        read_secret()
    except ValueError as error:
        raise SystemExit(f"error: FORGE_SECRET: {error}") from None
    rank = meeting.rank
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own store is at the address then
    serves = rank == 0 and not agent
    try:
        store = dist.TCPStore(meeting.address, meeting.port, meeting.world, is_master=serves, timeout=MEETING_TIMEOUT)
    except dist.DistError as error:
        action = "listen" if serves else "reach rank 0"
        address = f"{meeting.address}:{meeting.port}"
        raise SystemExit(f"error: rank {rank} cannot {action} at MASTER_ADDR {address}: {error}") from None
    attempt = (
        f"forge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # every restart of torchrun meets under new keys
    )
    command = [sys.executable, "-m", "forge", "worker", "--listen", ":0", "--stdin"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(os.environ["FORGE_SECRET"] + "\n")
    worker.stdin.flush()
    try:
        listening = worker.stdout.readline().strip()
        if not listening:
            raise SystemExit(f"error: the worker of rank {rank} ended with {worker.wait()}")
        store.set(f"{attempt}/{rank}", listening)
        if rank:
            store.wait([f"{attempt}/over"], timedelta(days=365))
            return int(store.get(f"{attempt}/over"))
        hosts = [store.get(f"{attempt}/{number}").decode(errors="replace") for number in range(meeting.world)]
        try:
            environment = environment_of_run(hosts, os.environ)
        except ValueError as error:
            store.set(f"{attempt}/over", "1")
            raise SystemExit(f"error: {error}") from None
        code = run_as_child(run, environment)
        store.set(f"{attempt}/over", str(code))
        return code
    finally:
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())
