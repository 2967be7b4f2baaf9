"""For launchers that start the same program on every machine, such as torchrun, mpirun or srun:

    FORGE_SECRET=... torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29400 \\
        -m forge.runtime.cluster.torchrun train CONFIG --training.steps 100

Rank 0 is the controller and has a worker, all others have a worker. It reads RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, and exchanges the workers' addresses by torch.distributed's store, which sees nothing else.
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

from ...system.addresses import joined
from .process import run_as_child
from .wire import split
from .words import check_words

MEETING = timedelta(minutes=10)
_HOST = re.compile(r"[\w.:%][\w.:%-]{0,254}", re.ASCII)
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Meeting(NamedTuple):
    """Where the ranks of a launcher meet, and which of how many this one is."""

    rank: int
    world: int
    address: str
    port: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Meeting:
        """From the variables of a launcher. ValueError: one is missing, or no such value; names it."""
        numbers = []
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            if re.fullmatch("[0-9]{1,9}", text := environment.get(name, "")) is None:
                raise ValueError(f"{name} is {text[:80]!a}, and must be a number: start this with torchrun or the like")
            numbers.append(int(text))
        rank, world, port = numbers
        if not (rank < world and 0 < port < 65536):
            raise ValueError(f"RANK {rank} of WORLD_SIZE {world} at MASTER_PORT {port} is none: ranks begin at 0")
        address = environment.get("MASTER_ADDR", "")
        if _HOST.fullmatch(address) is None:
            raise ValueError(f"MASTER_ADDR is {address[:80]!a}, and must be a name or an address")
        return cls(rank, world, address, port)


def command_of_run(words: Sequence[str]) -> list[str]:
    """The command line of the run that these words ask for. ValueError: a word that no program can be given."""
    check_words(words)
    return [sys.executable, "-m", "forge", *words]


def environment_of_run(hosts: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Of a run on these workers. Its own processes are no ranks of the launcher.

    Raises:
        ValueError: a rank has given what is no address of one worker.
    """
    for rank, host in enumerate(hosts):
        try:
            name, port = split(host)
            sound = _HOST.fullmatch(name) is not None and joined(name, port) == host
        except ValueError:
            sound = False
        if not sound:
            raise ValueError(f"the worker of rank {rank} listens at {host[:80]!a}, which is no address")
    usual = {name: value for name, value in environment.items() if name not in RANKS}
    return {**usual, "FORGE_HOSTS": ",".join(hosts), "FORGE_EXPECT_HOSTS": str(len(hosts))}


def main() -> int:
    """Start the worker of this rank, and at rank 0 the run; returns its exit code."""
    import torch.distributed as dist

    try:
        meeting, run = Meeting.read(os.environ), command_of_run(sys.argv[1:])
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if "FORGE_SECRET" not in os.environ:
        if meeting.world > 1:
            raise SystemExit(
                "error: FORGE_SECRET is not set: set it to the same 32 characters or more on every machine"
            )
        os.environ["FORGE_SECRET"] = secrets.token_hex(32)
    if not os.environ["FORGE_SECRET"].isprintable():  # the worker reads it as a line
        raise SystemExit("error: FORGE_SECRET has a line break or a control character: leave it out")
    agent, rank = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", meeting.rank
    store = dist.TCPStore(
        meeting.address, meeting.port, meeting.world, is_master=rank == 0 and not agent, timeout=MEETING
    )
    life = f"forge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # of torchrun: every restart meets again
    command = [sys.executable, "-m", "forge", "worker", "--listen", ":0", "--stdin"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(os.environ["FORGE_SECRET"] + "\n")
    worker.stdin.flush()
    try:
        listening = worker.stdout.readline().strip()
        if not listening:
            raise SystemExit(f"error: the worker of rank {rank} ended with {worker.wait()}")
        store.set(f"{life}/{rank}", listening)
        if rank:
            store.wait([f"{life}/over"], timedelta(days=365))
            return int(store.get(f"{life}/over"))
        hosts = [store.get(f"{life}/{other}").decode(errors="replace") for other in range(meeting.world)]
        try:
            environment = environment_of_run(hosts, os.environ)
        except ValueError as error:
            store.set(f"{life}/over", "1")
            raise SystemExit(f"error: {error}") from None
        code = run_as_child(run, environment)
        store.set(f"{life}/over", str(code))
        return code
    finally:
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())
