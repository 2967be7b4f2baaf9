"""Other packages: whether this machine must have those that a configuration needs, and names that they provide."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from typing import Any

_runs_elsewhere = ContextVar("runs_elsewhere", default=False)


@contextmanager
def run_elsewhere() -> Iterator[None]:
    """Make `are_needed` return False within the block, so that optional packages are not required on this machine.

    For commands that check a configuration whose run happens on other machines.
    """
    token = _runs_elsewhere.set(True)
    try:
        yield
    finally:
        _runs_elsewhere.reset(token)


def are_needed() -> bool:
    """Return whether this machine must have the packages that a configuration needs; False within `run_elsewhere`."""
    return not _runs_elsewhere.get()


def find_foreign_name(name: str) -> Any:
    """Return the object that an extension provides under a name that a module of this library does not have.

    A module with `__getattr__ = find_foreign_name` asks the entry points of the group `forge.names`, which are
    functions from a name to an object.

    Raises:
        AttributeError: none of them has the name.
        ImportError: a package knows the name, and says what replaces it.
    """
    for point in () if name.startswith("_") else entry_points(group="forge.names"):
        return point.load()(name)
    raise AttributeError(f"there is no {name!r} here")
