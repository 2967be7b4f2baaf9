"""`forge doctor cluster`: what would go wrong on the hosts of a run, before one is started."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .credentials import Credentials
from .inventory import OPEN_FILES, SHARED_MEMORY, Inventory
from .machine import answer_of
from .pool import agree
from .wire import HostError, connect, send

SKEW = 5.0  # seconds between clocks that are noticed in logs
ROUND_TRIPS = 5
MEASURED = 64 << 20  # bytes sent between each two hosts
SLOWEST = 0.5  # of the median bandwidth, below which a connection is named
LOCKED_MEMORY = 1 << 30
FORWARDS = 8  # hosts of which each pair is measured; of more, each with the next


@dataclass
class Diagnosis:
    """Rows of a table, and problems, each with its remedy."""

    rows: list[list[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def examine(hosts: Sequence[str], credentials: Credentials, folder: Path | None = None) -> Diagnosis:
    """Ask every host, and have them measure the bandwidth between them.

    Args:
        folder: that all of them should see.
    """
    found = Diagnosis()
    inventories: dict[str, Inventory] = {}
    for host in hosts:
        try:
            began, wall = time.monotonic(), time.time()
            described = await ask(host, credentials, do="describe")
            trips = [time.monotonic() - began]
            for _ in range(ROUND_TRIPS - 1):
                began = time.monotonic()
                await ask(host, credentials, do="describe")
                trips.append(time.monotonic() - began)
        except (OSError, HostError) as error:
            found.problems.append(str(error))
            continue
        holder = described.pop("held_by")
        inventories[host] = one = Inventory.from_dict(described)
        skew = one.clock - wall - trips[0] / 2
        found.rows.append(
            [host, one.name, str(one), f"{1000 * statistics.median(trips):.0f} ms", f"{skew:+.1f} s", holder or "free"]
        )
        if abs(skew) > SKEW:
            found.problems.append(f"{one.name}: its clock differs by {skew:+.0f} s: start chronyd or ntpd there")
        if one.shared_memory < SHARED_MEMORY:
            found.problems.append(
                f"{one.name}: /dev/shm has {one.shared_memory / 1e9:.1f} GB free, and holds three versions of the "
                "weights: enlarge it (mount -o remount,size=..., docker --shm-size)"
            )
        if one.open_files < OPEN_FILES:
            found.problems.append(f"{one.name}: a process may open {one.open_files} files: ulimit -n {OPEN_FILES}")
        if one.infiniband and 0 <= one.locked_memory < LOCKED_MEMORY:
            found.problems.append(
                f"{one.name}: it has RDMA ({', '.join(one.infiniband)}), and a process may lock "
                f"{one.locked_memory >> 20} MB: ulimit -l unlimited"
            )
        try:
            agree(one)
        except ValueError as error:
            found.problems.append(str(error))
    counts = {len(one.gpus) for one in inventories.values()}
    if len(counts) > 1:
        each = ", ".join(f"{one.name} {len(one.gpus)}" for one in inventories.values())
        found.problems.append(f"hosts have different numbers of GPUs: {each}: is a driver or a device missing?")
    if folder is not None:
        await _check_folder(folder, inventories, credentials, found)
    await _check_bandwidth(inventories, credentials, found)
    return found


async def _check_folder(folder: Path, hosts: dict[str, Inventory], credentials: Credentials, found: Diagnosis) -> None:
    token, path = secrets.token_hex(8), folder / f".forge-doctor-{os.getpid()}"
    path.write_text(token)
    try:
        for host, one in hosts.items():
            if not await ask(host, credentials, do="sees", path=str(path.absolute()), content=token):
                found.problems.append(
                    f"{one.name} does not see {folder}: share it (NFS, Lustre) if trainers are placed there"
                )
    finally:
        path.unlink()


async def _check_bandwidth(hosts: dict[str, Inventory], credentials: Credentials, found: Diagnosis) -> None:
    names = list(hosts)
    pairs = [(one, other) for one in names for other in names if one != other]
    if len(names) > FORWARDS:
        pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    rates = {}
    for one, other in pairs:  # one after the other: they share cables
        try:
            seconds = await ask(one, credentials, do="measure", peer=other, bytes=MEASURED)
            rates[one, other] = MEASURED / seconds / 1e6
        except (OSError, HostError) as error:
            found.problems.append(f"{hosts[one].name} does not reach {other}: {error}")
    if not rates:
        return
    middle = statistics.median(rates.values())
    found.rows.append(["between hosts", "", f"median {middle:.0f} MB/s over TLS", "", "", ""])
    for (one, other), rate in rates.items():
        if rate < SLOWEST * middle:
            found.problems.append(f"{hosts[one].name} to {hosts[other].name}: {rate:.0f} MB/s, median {middle:.0f}")


async def seen_by(host: str, credentials: Credentials, path: Path, content: str) -> bool:
    """Whether a file has this content on a host too; True for a host that is away, which is none of this run's yet."""
    try:
        return await ask(host, credentials, do="sees", path=str(path), content=content)
    except (OSError, HostError):
        return True


async def ask(host: str, credentials: Credentials, **message: Any) -> Any:
    """The answer of a host's daemon.

    Raises:
        OSError, HostError: it cannot be reached, or could not do it.
    """
    reader, writer = await connect(host, credentials)
    try:
        send(writer, message)
        return await answer_of(reader, host, 120.0 if message["do"] == "measure" else None)
    finally:
        writer.close()


def shown(found: Diagnosis) -> str:
    """The table and the problems, as text."""
    head = ["host", "name", "has", "round trip", "clock", "run"]
    rows = [head, *found.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += (
        ["", *(f"problem: {problem}" for problem in found.problems)] if found.problems else ["", "no problem found"]
    )
    return "\n".join(lines)
