"""A cache of scores by content, in memory or in a file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

LOCK_TIMEOUT = 10.0  # seconds for another process to finish writing


def key_of(fingerprint: str, prompt: str, responses: Sequence[str], target: str | None) -> str:
    """The cache key: a hash of everything that the scores depend on."""
    return hashlib.sha256(json.dumps([fingerprint, prompt, list(responses), target]).encode()).hexdigest()


class Cache:
    """Numbers by key. Several processes may share a file. A panel only stores scores, never that one is missing.

    Args:
        path: an sqlite file in an existing folder, created if missing, which only grows: delete it to start over. None:
            entries are in memory.

    Raises:
        ValueError: no such folder, or the file is not a cache.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._entries: dict[str, tuple[float, ...]] = {}
        if self.path is not None:
            try:
                with closing(self._open()) as file:
                    file.execute("PRAGMA journal_mode=WAL")  # readers do not wait for a writer
                    file.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
            except sqlite3.DatabaseError as error:
                raise ValueError(f"{self.path} cannot be used as a cache: {error}") from error

    async def get(self, keys: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """The entries that exist. sqlite3.Error: the file cannot be read."""
        if self.path is None:
            return {key: self._entries[key] for key in keys if key in self._entries}

        def read() -> dict[str, tuple[float, ...]]:
            with closing(self._open()) as file:
                query = "SELECT value FROM scores WHERE key = ?"
                stored = {key: file.execute(query, (key,)).fetchone() for key in keys}
            return {key: tuple(json.loads(row[0])) for key, row in stored.items() if row}

        return await asyncio.to_thread(read)

    async def put(self, values: Mapping[str, tuple[float, ...]]) -> None:
        """Store entries, in the file all or none. sqlite3.Error: writing failed."""

        def write() -> None:
            rows = [(key, json.dumps(value)) for key, value in values.items()]
            with closing(self._open()) as file, file:
                file.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)

        if self.path is None:
            self._entries.update(values)
        elif values:
            await asyncio.to_thread(write)

    def _open(self) -> sqlite3.Connection:
        # A new connection for each use: it must not cross threads or forks.
        assert self.path is not None
        return sqlite3.connect(self.path, timeout=LOCK_TIMEOUT)
