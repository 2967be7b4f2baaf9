"""The processes that a process has started, as the kernel lists them."""

from pathlib import Path


def descendants(root: int) -> list[int]:
    """The process and all that it has started, directly or not."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def components(root: int) -> list[int]:
    """The processes of a run that components live in."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in descendants(root)[1:]}
    return sorted(pid for pid, name in names.items() if name not in ("sh", "forge-fork", "forge-launcher"))
