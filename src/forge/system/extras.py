"""Optional packages: whether a configuration may need packages, files or settings that this machine does not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_runs_elsewhere = ContextVar("runs_elsewhere", default=False)


@contextmanager
def run_elsewhere() -> Iterator[None]:
    """Within the block, configurations are for runs on other machines: `are_needed` is False."""
    token = _runs_elsewhere.set(True)
    try:
        yield
    finally:
        _runs_elsewhere.reset(token)


def are_needed() -> bool:
    """Return whether this machine must have what a configuration needs; False within `run_elsewhere`."""
    return not _runs_elsewhere.get()
