"""A cache of scores by content, in memory and optionally in a file."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock

from .threads import in_own_thread
from .verifier import Verifier, reason_of

log = logging.getLogger(__name__)

FINGERPRINT_TIMEOUT = 600.0  # seconds to read a fingerprint: that of a model reads all its weights
LOCK_TIMEOUT = 10.0  # seconds for another process to finish writing
KEYS_PER_QUERY = 500  # keys in one query; sqlite allows about a thousand


def key_of(fingerprint: str, prompt: str, responses: Sequence[str], target: str | None) -> str:
    """The cache key: a hash of everything that the scores depend on."""
    return hashlib.sha256(json.dumps([fingerprint, prompt, list(responses), target]).encode()).hexdigest()


class Fingerprint:
    """Reads a verifier's `fingerprint` in a thread; concurrent calls share one reading, which outlives each of them."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self._failed = verifier, False
        self._reading: asyncio.Task[str | None] | None = None
        self._since = 0.0

    async def __call__(self) -> str | None:
        """The fingerprint; None: the verifier has none, or it cannot be read in FINGERPRINT_TIMEOUT (logged once)."""
        if self._failed:
            return None
        reading = self._reading
        if reading is None or reading.done() or reading.get_loop() is not asyncio.get_running_loop():
            self._since = time.monotonic()
            reading = self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(reading)

    @property
    def seconds(self) -> float:
        """Duration of the reading in progress; 0 if there is none."""
        return 0.0 if self._reading is None or self._reading.done() else time.monotonic() - self._since

    async def _read(self) -> str | None:
        name = self._verifier.names[0]

        # No fingerprint is allowed; an error within one is not taken for its absence.
        def read() -> str | None:
            try:
                return self._verifier.fingerprint  # type: ignore[attr-defined]
            except AttributeError:
                if inspect.getattr_static(self._verifier, "fingerprint", None) is not None:
                    raise  # from within the property
                return None

        try:
            return await in_own_thread(read, limit=FINGERPRINT_TIMEOUT, name=f"the fingerprint of {name}")
        except Exception as error:
            self._failed = True
            log.warning("the scores of %s are not cached, its fingerprint cannot be read: %s", name, reason_of(error))
            return None


class Cache:
    """Numbers by key. Several processes may share a file. A panel only stores scores, never that one is missing.

    Args:
        path: an sqlite file in an existing folder, created if missing. It only grows: delete it to start over.
        max_entries: entries in memory; the least recently used are dropped.

    Raises:
        ValueError: `max_entries` below 1, no such folder, or the file is not a cache.
    """

    def __init__(self, path: str | Path | None = None, *, max_entries: int = 100_000) -> None:
        if max_entries < 1:
            raise ValueError(f"a cache must hold at least 1 entry, got max_entries = {max_entries}")
        self.path = None if path is None else Path(path)
        self._max_entries = max_entries
        self._entries: OrderedDict[str, tuple[float, ...]] = OrderedDict()
        self._lock = Lock()
        if self.path is not None:
            # A path that is not a cache is an error before the first score.
            if not self.path.parent.is_dir():
                raise ValueError(f"the folder of the cache {self.path} does not exist: make it first")
            try:
                with closing(self._open()) as file:
                    file.execute("PRAGMA journal_mode=WAL")  # readers do not wait for a writer
                    file.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
            except sqlite3.DatabaseError as error:
                raise ValueError(f"{self.path} cannot be used as a cache: {error}") from error

    def __len__(self) -> int:
        """Entries in memory."""
        return len(self._entries)

    async def get(self, keys: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """The entries that exist. sqlite3.Error: the file cannot be read."""
        # Memory first; what it lacks is read from the file, in a thread.
        entries = {}
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._entries.move_to_end(key)
                    entries[key] = self._entries[key]
        missing = [key for key in dict.fromkeys(keys) if key not in entries]

        def read() -> dict[str, tuple[float, ...]]:
            stored: dict[str, tuple[float, ...]] = {}
            with closing(self._open()) as file:
                for start in range(0, len(missing), KEYS_PER_QUERY):
                    chunk = missing[start : start + KEYS_PER_QUERY]
                    marks = ",".join("?" * len(chunk))
                    rows = file.execute(f"SELECT key, value FROM scores WHERE key IN ({marks})", chunk)
                    stored |= {key: tuple(json.loads(value)) for key, value in rows}
            return stored

        if self.path is not None and missing:
            stored = await asyncio.to_thread(read)
            self._remember(stored)
            entries |= stored
        return entries

    async def put(self, values: Mapping[str, tuple[float, ...]]) -> None:
        """Store entries, in the file all or none. sqlite3.Error: writing failed; they are in memory only."""
        self._remember(values)

        def write() -> None:
            rows = [(key, json.dumps(value)) for key, value in values.items()]
            with closing(self._open()) as file, file:
                file.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)

        if self.path is not None and values:
            await asyncio.to_thread(write)

    def _remember(self, values: Mapping[str, tuple[float, ...]]) -> None:
        with self._lock:
            for key, value in values.items():
                self._entries[key] = value
                self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def _open(self) -> sqlite3.Connection:
        # A new connection for each use: it must not cross threads or forks.
        assert self.path is not None
        return sqlite3.connect(self.path, timeout=LOCK_TIMEOUT)
