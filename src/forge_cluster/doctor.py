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

SKEW = 5.0  # seconds between clocks that are noticed in logs
LOCKED_MEMORY = 1 << 30  # bytes; RDMA locks the buffers of the weights


@dataclass
class Diagnosis:
    """Rows of a table, and problems with their fixes."""

    rows: list[list[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def render(self) -> str:
        """Format the table and the problems as text."""
        head = ["host", "name", "has", "round trip", "clock", "run"]
        rows = [head, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += (
            ["", *(f"problem: {problem}" for problem in self.problems)] if self.problems else ["", "no problem found"]
        )
        return "\n".join(lines)


async def query_hosts(hosts: Sequence[str], credentials: Credentials, folder: Path | None = None) -> Diagnosis:
    """Query every host.

    Args:
        folder: a folder that all hosts should see.
    """
    diagnosis = Diagnosis()
    inventories: dict[str, Inventory] = {}
    for host in hosts:
        began = time.monotonic()
        wall = time.time()
        try:
            inventory, holder = await describe_host(host, credentials)
        except (OSError, HostError) as error:
            diagnosis.problems.append(str(error))
            continue

        # The description was made about half a round trip after it was asked for.
        round_trip = time.monotonic() - began
        skew = inventory.clock - wall - round_trip / 2
        inventories[host] = inventory
        diagnosis.rows.append(
            [
                host,
                inventory.name,
                str(inventory),
                f"{1000 * round_trip:.0f} ms",
                f"{skew:+.1f} s",
                holder or "free",
            ]
        )

        diagnosis.problems += find_problems(inventory, skew)

    # Same machines are the rule: a missing GPU is most often a broken one.
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
    """Return the problems of a host, each of which would later fail in a way that does not name it.

    Args:
        skew: seconds by which its clock is ahead of this machine's.
    """
    name = inventory.name
    problems = []
    if abs(skew) > SKEW:
        problems.append(f"{name}: its clock differs by {skew:+.0f} s: start chronyd or ntpd there")

    if inventory.shared_memory < SHARED_MEMORY:
        problems.append(
            f"{name}: /dev/shm has {inventory.shared_memory / 1e9:.1f} GB free, and holds three versions of the "
            "weights: enlarge it (mount -o remount,size=..., docker --shm-size)"
        )

    if inventory.open_files < OPEN_FILES:
        problems.append(f"{name}: a process may open {inventory.open_files} files: ulimit -n {OPEN_FILES}")

    if inventory.infiniband and 0 <= inventory.locked_memory < LOCKED_MEMORY:
        problems.append(
            f"{name}: it has RDMA ({', '.join(inventory.infiniband)}), and a process may lock "
            f"{inventory.locked_memory >> 20} MB: ulimit -l unlimited"
        )

    try:
        check_versions(inventory)
    except ValueError as error:
        problems.append(str(error))
    return problems


async def _check_folder(
    folder: Path, hosts: dict[str, Inventory], credentials: Credentials, diagnosis: Diagnosis
) -> None:
    # A token that no other process can guess: a file of another run must not count.
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
    """Return whether a file has this content on a host too; True for an unreachable host (not part of this run yet)."""
    try:
        return await query_host(host, credentials, do="sees", path=str(path), content=content)
    except (OSError, HostError):
        return True
