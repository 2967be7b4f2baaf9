"""`forge doctor cluster`: check the hosts of a run before it starts."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge.runtime.inventory import OPEN_FILES, SHARED_MEMORY

from .credentials import Credentials
from .inventory import Inventory
from .machine import first_answer
from .pool import check_versions
from .wire import HostError, Json, connect_host, send_message

SKEW = 5.0  # seconds between clocks that are noticed in logs
ROUND_TRIPS = 5
LOCKED_MEMORY = 1 << 30  # bytes; RDMA locks the buffers of the weights


@dataclass
class Diagnosis:
    """Rows of a table, and problems with their remedies."""

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
        try:
            # One answer tells what the host is; several tell how far it is.
            began = time.monotonic()
            wall = time.time()
            description = await query_host(host, credentials, do="describe")
            trips = [time.monotonic() - began]
            for _ in range(ROUND_TRIPS - 1):
                began = time.monotonic()
                await query_host(host, credentials, do="describe")
                trips.append(time.monotonic() - began)
        except (OSError, HostError) as error:
            diagnosis.problems.append(str(error))
            continue

        holder = description.pop("held_by")
        inventory = Inventory.from_dict(description)
        inventories[host] = inventory

        # The description was made about half a round trip after it was asked for.
        skew = inventory.clock - wall - trips[0] / 2
        diagnosis.rows.append(
            [
                host,
                inventory.name,
                str(inventory),
                f"{1000 * statistics.median(trips):.0f} ms",
                f"{skew:+.1f} s",
                holder or "free",
            ]
        )

        # Each of these would later fail in a way that does not name it.
        if abs(skew) > SKEW:
            diagnosis.problems.append(
                f"{inventory.name}: its clock differs by {skew:+.0f} s: start chronyd or ntpd there"
            )

        if inventory.shared_memory < SHARED_MEMORY:
            diagnosis.problems.append(
                f"{inventory.name}: /dev/shm has {inventory.shared_memory / 1e9:.1f} GB free, and holds three versions "
                "of the weights: enlarge it (mount -o remount,size=..., docker --shm-size)"
            )

        if inventory.open_files < OPEN_FILES:
            diagnosis.problems.append(
                f"{inventory.name}: a process may open {inventory.open_files} files: ulimit -n {OPEN_FILES}"
            )

        if inventory.infiniband and 0 <= inventory.locked_memory < LOCKED_MEMORY:
            diagnosis.problems.append(
                f"{inventory.name}: it has RDMA ({', '.join(inventory.infiniband)}), and a process may lock "
                f"{inventory.locked_memory >> 20} MB: ulimit -l unlimited"
            )

        try:
            check_versions(inventory)
        except ValueError as error:
            diagnosis.problems.append(str(error))

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


async def query_host(host: str, credentials: Credentials, **message: Json) -> Json:
    """Send a message to a host's daemon and return its answer.

    Raises:
        OSError, HostError: it cannot be reached, or reported an error.
    """
    reader, writer = await connect_host(host, credentials)
    try:
        send_message(writer, message)
        return await first_answer(reader, host)
    finally:
        writer.close()
