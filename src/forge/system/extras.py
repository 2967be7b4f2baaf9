"""Optional packages: whether a configuration may name those that are not installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_runs_elsewhere = ContextVar("runs_elsewhere", default=False)


@contextmanager
def run_elsewhere() -> Iterator[None]:
    """Within the block, configurations are of runs on other machines: this one need not have what they need."""
    token = _runs_elsewhere.set(True)
    try:
        yield
    finally:
        _runs_elsewhere.reset(token)


def are_needed() -> bool:
    """Return whether this machine must have what a configuration needs."""
    return not _runs_elsewhere.get()
