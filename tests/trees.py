"""The processes that a process has started, as the kernel lists them."""

from pathlib import Path

from benchmarks.machine import descendants

__all__ = ["components", "descendants"]


def components(root: int) -> list[int]:
    """The processes of a run that components live in."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in descendants(root)[1:]}
    return sorted(pid for pid, name in names.items() if name not in ("sh", "forge-fork", "forge-launcher"))
