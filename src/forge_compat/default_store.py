"""The store of a run: the one that all processes of a controller share without passing it along."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from pathlib import Path

from forge.observability.metrics import PROCESS_NAME
from forge.runtime.names import STORE as ADDRESS
from forge.runtime.store.versions import PREFIX, VersionStore, memory_folder
from forge.system.scratch import MACHINE

MARK = "default"  # a file in the folder of the store that child processes share

_store: VersionStore | None = None


def default_store() -> VersionStore:
    """Return the store of this run: the parent process's, or a new one that is removed with this process.

    A process finds the store in its environment, or, if it was started before the store, by the ids of the processes
    that it descends from.

    Raises:
        RuntimeError: this process was started by a controller that has no store.
    """
    global _store
    address = os.environ.get(ADDRESS)
    if _store is not None and str(_store.root) == address and _store.root.is_dir():
        # A store that this process owns and has closed is replaced; the parent's is opened at its address.
        return _store
    if not address and (_store is None or not _store.owned):
        address = _address_of_ancestor()
    if address and (_store is None or not _store.owned):
        use(VersionStore(address))
    elif PROCESS_NAME in os.environ:
        raise RuntimeError("this run has no store: have the controller call forge.store.initialize() at first")
    else:
        use(VersionStore.create())
        assert _store is not None
        (_store.root / MARK).touch()
        atexit.register(_store.close)
    assert _store is not None
    return _store


def use(store: VersionStore) -> None:
    """Make this the store of the run, also for processes started from now on."""
    global _store
    _store = store
    os.environ[ADDRESS] = str(store.root)


def release() -> None:
    """Remove the store of the run if this process made it; another process's is only forgotten."""
    global _store
    store = _store
    # The next use makes or finds another one.
    _store = None
    if store is None:
        return
    if store.owned:
        store.close()
    if os.environ.get(ADDRESS) == str(store.root):
        del os.environ[ADDRESS]


def _address_of_ancestor() -> str | None:
    for process in _ancestors():
        for folder in memory_folder().glob(f"{PREFIX}{process}-{MACHINE}-*"):
            # Another user's folder could have values of theirs in it.
            if (folder / MARK).exists() and folder.lstat().st_uid == os.geteuid():
                return str(folder)
    return None


def _ancestors() -> Iterator[int]:
    """Ids of the parent process, its parent and so on; none where there is no /proc."""
    process = os.getppid()
    while process > 1:
        yield process
        try:
            fields = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return
        # The name, in brackets, may have blanks.
        process = int(fields.rpartition(")")[2].split()[1])
