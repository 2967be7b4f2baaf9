"""Optional packages: whether a configuration may need packages, files or settings that this machine does not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_runs_elsewhere = ContextVar("runs_elsewhere", default=False)


@contextmanager
def run_elsewhere() -> Iterator[None]:
    """Do not require optional packages on this machine within the block: `are_needed` returns False.

    For commands that check a configuration whose run happens on other machines.
    """
    token = _runs_elsewhere.set(True)
    try:
        yield
    finally:
        _runs_elsewhere.reset(token)


def are_needed() -> bool:
    """Return whether this machine must have what a configuration needs; False within `run_elsewhere`."""
    return not _runs_elsewhere.get()
