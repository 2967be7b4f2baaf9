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

READING = 600.0  # seconds to read a fingerprint: that of a model reads all its weights
WAIT = 10.0  # seconds for another process to finish writing
AT_A_TIME = 500  # keys in one query; sqlite allows about a thousand


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
        """None: the verifier has none, or reading it failed (logged once). Takes at most READING seconds."""
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

        def read() -> str | None:
            try:
                return self._verifier.fingerprint  # type: ignore[attr-defined]
            except AttributeError:
                if inspect.getattr_static(self._verifier, "fingerprint", None) is not None:
                    raise  # from within the property
                return None

        try:
            return await in_own_thread(read, limit=READING, what=f"the fingerprint of {name}")
        except Exception as error:
            self._failed = True
            log.warning("the scores of %s are not cached, its fingerprint cannot be read: %s", name, reason_of(error))
            return None


class Cache:
    """Numbers by key. Several processes may share a file. A panel only stores scores, never that one is missing.

    Args:
        path: an sqlite file in an existing folder, created if missing. It only grows: delete it to start over.
        most: entries kept in memory; the least recently used are dropped.

    Raises:
        ValueError: `most` below 1, no such folder, or the file is not a cache.
    """

    def __init__(self, path: str | Path | None = None, *, most: int = 100_000) -> None:
        if most < 1:
            raise ValueError(f"a cache must hold at least 1 entry, got most = {most}")
        self.path, self._most = None if path is None else Path(path), most
        self._kept: OrderedDict[str, tuple[float, ...]] = OrderedDict()
        self._lock = Lock()
        if self.path is not None:
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
        return len(self._kept)

    async def get(self, keys: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """The entries that exist. sqlite3.Error: the file cannot be read."""
        found = {}
        with self._lock:
            for key in keys:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    found[key] = self._kept[key]
        unknown = [key for key in dict.fromkeys(keys) if key not in found]

        def read() -> dict[str, tuple[float, ...]]:
            stored: dict[str, tuple[float, ...]] = {}
            with closing(self._open()) as file:
                for start in range(0, len(unknown), AT_A_TIME):
                    some = unknown[start : start + AT_A_TIME]
                    marks = ",".join("?" * len(some))
                    rows = file.execute(f"SELECT key, value FROM scores WHERE key IN ({marks})", some)
                    stored |= {key: tuple(json.loads(value)) for key, value in rows}
            return stored

        if self.path is not None and unknown:
            stored = await asyncio.to_thread(read)
            self._keep(stored)
            found |= stored
        return found

    async def put(self, values: Mapping[str, tuple[float, ...]]) -> None:
        """Store entries, in the file all or none. sqlite3.Error: writing failed; they are in memory only."""
        self._keep(values)

        def write() -> None:
            rows = [(key, json.dumps(value)) for key, value in values.items()]
            with closing(self._open()) as file, file:
                file.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)

        if self.path is not None and values:
            await asyncio.to_thread(write)

    def _keep(self, values: Mapping[str, tuple[float, ...]]) -> None:
        with self._lock:
            for key, value in values.items():
                self._kept[key] = value
                self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def _open(self) -> sqlite3.Connection:
        # A new connection for each use: it must not cross threads or forks.
        assert self.path is not None
        return sqlite3.connect(self.path, timeout=WAIT)
