"""`forge doctor cluster`: check the hosts of a run before it starts."""

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge.runtime.inventory import OPEN_FILES, SHARED_MEMORY

from .credentials import Credentials
from .inventory import Inventory
from .machine import describe_host, query_host
from .pool import check_versions
from .wire import HostError

SKEW = 5.0  # seconds by which clocks may differ: more confuses readers of logs
LOCKED_MEMORY = 1 << 30  # bytes that a process must be able to lock: RDMA locks the buffers of the weights


@dataclass
class Diagnosis:
    """Result of an examination: a row of cells for each host, and sentences on problems with their fixes."""

    rows: list[list[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def render(self) -> str:
        """Return a table of the hosts and the problems as text."""
        head = ["host", "name", "has", "round trip", "clock", "run"]
        rows = [head, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        problems = [f"problem: {problem}" for problem in self.problems] or ["no problem found"]
        return "\n".join([*lines, "", *problems])


async def query_hosts(hosts: Sequence[str], credentials: Credentials, folder: Path | None = None) -> Diagnosis:
    """Query every host, and return what they have and the problems.

    Args:
        hosts: HOST:PORT of each.
        folder: that all hosts should see; None for none.
    """
    diagnosis = Diagnosis()
    inventories: dict[str, Inventory] = {}
    for host in hosts:
        start, clock = time.monotonic(), time.time()
        try:
            inventory, holder = await describe_host(host, credentials)
        except (OSError, HostError) as error:
            diagnosis.problems.append(str(error))
            continue

        # The host read its clock about half a round trip after it was asked.
        round_trip = time.monotonic() - start
        skew = inventory.clock - clock - round_trip / 2
        inventories[host] = inventory
        times = [f"{1000 * round_trip:.0f} ms", f"{skew:+.1f} s"]
        diagnosis.rows.append([host, inventory.name, str(inventory), *times, holder or "free"])
        diagnosis.problems += find_problems(inventory, skew)

    # The machines of a run are usually alike: a missing GPU is most often a broken one.
    counts = {len(inventory.gpus) for inventory in inventories.values()}
    if len(counts) > 1:
        gpu_counts = ", ".join(f"{inventory.name} {len(inventory.gpus)}" for inventory in inventories.values())
        diagnosis.problems.append(
            f"hosts have different numbers of GPUs: {gpu_counts}: is a driver or a device missing?"
        )

    if folder is not None:
        await _check_folder(folder, inventories, credentials, diagnosis)
    return diagnosis


def find_problems(inventory: Inventory, skew: float) -> list[str]:
    """Return the problems of a host that would let a run fail later without naming them, each with its fix.

    Args:
        skew: seconds by which the host's clock is ahead of this machine's.
    """
    checks = (
        (abs(skew) <= SKEW, f"its clock differs by {skew:+.0f} s: start chronyd or ntpd there"),
        (
            inventory.shared_memory >= SHARED_MEMORY,
            f"/dev/shm has {inventory.shared_memory / 1e9:.1f} GB free, and holds three versions of the weights: "
            "enlarge it (mount -o remount,size=..., docker --shm-size)",
        ),
        (
            inventory.open_files >= OPEN_FILES,
            f"a process may open {inventory.open_files} files: ulimit -n {OPEN_FILES}",
        ),
        (
            not inventory.infiniband or not 0 <= inventory.locked_memory < LOCKED_MEMORY,
            f"it has RDMA ({', '.join(inventory.infiniband)}), and a process may lock "
            f"{inventory.locked_memory >> 20} MB: ulimit -l unlimited",
        ),
    )
    problems = [f"{inventory.name}: {problem}" for is_right, problem in checks if not is_right]

    try:
        check_versions(inventory)
    except ValueError as error:
        problems.append(str(error))
    return problems


async def _check_folder(
    folder: Path, hosts: dict[str, Inventory], credentials: Credentials, diagnosis: Diagnosis
) -> None:
    # A random content, so that a file of another process does not count.
    token = secrets.token_hex(8)
    path = folder / f".forge-doctor-{os.getpid()}"
    path.write_text(token)
    try:
        for host, inventory in hosts.items():
            if not await query_host(host, credentials, do="sees", path=str(path.absolute()), content=token):
                diagnosis.problems.append(
                    f"{inventory.name} does not see {folder}: share it (NFS, Lustre) if trainers are placed there"
                )
    finally:
        path.unlink()


async def host_sees(host: str, credentials: Credentials, path: Path, content: str) -> bool:
    """Return whether a file has this content on a host too.

    True for a host that cannot be reached: it is not part of the run yet.
    """
    try:
        return await query_host(host, credentials, do="sees", path=str(path), content=content)
    except (OSError, HostError):
        return True
