"""What survives a kill of the server: sessions, models, samplers, checkpoints, and every request with its result.

SQLite holds all of it: a request is written before it is accepted, its result before it is answered.
"""

import json
import re
import shutil
import sqlite3
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = """
PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT, project TEXT, name TEXT, metadata TEXT, created REAL, status TEXT);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, project TEXT, config TEXT, metadata TEXT, created REAL,
    touched REAL, applied INTEGER DEFAULT -1);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, model TEXT, kind TEXT, model_path TEXT, folder TEXT,
    clients INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT, kind TEXT, owner TEXT, config TEXT, metadata TEXT, created REAL, expires REAL,
    public INTEGER DEFAULT 0, bytes INTEGER);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, owner TEXT, subject TEXT, seq INTEGER, kind TEXT, body BLOB, result BLOB, error TEXT,
    created REAL);
CREATE INDEX IF NOT EXISTS requests_of ON requests (subject, seq);
CREATE INDEX IF NOT EXISTS requests_open ON requests (owner) WHERE result IS NULL AND error IS NULL;
CREATE TABLE IF NOT EXISTS sequences (id TEXT PRIMARY KEY, session TEXT, logprobs BLOB, created REAL);
"""
sqlite3.register_adapter(dict, json.dumps)  # mappings are columns of JSON
KEPT = 24 * 3600.0  # seconds for which results and recorded sequences are kept
SEGMENTS = {"save": "weights", "sampler": "sampler_weights", "external": "external_weights"}
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
PATH = re.compile(
    r"tinker://(?P<model>[\w:-]+)/(?P<segment>weights|sampler_weights|external_weights)/(?P<name>[\w.-]+)"
)
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 24 * 3600  # seconds


class Journal:
    """The tables of a server's folder. All methods must be called from one thread."""

    def __init__(self, folder: Path) -> None:
        self._tables = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
        self._tables.row_factory = sqlite3.Row
        # A killed process loses nothing that was written; only a power failure may lose the last requests.
        # The lock ends with the process.
        try:
            self._tables.executescript(SCHEMA)
            self.remove_old()
        except sqlite3.OperationalError as error:
            raise ValueError(f"{folder} is in use by another server, or not writable: {error}") from None

    def add(self, table: str, **columns: Any) -> bool:
        """Insert a row, and return whether it is new: a row of the same key stays as it is."""
        marks = ", ".join("?" * len(columns))
        statement = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({marks})"
        return self._tables.execute(statement, list(columns.values())).rowcount == 1

    def change(self, table: str, key: str, **columns: Any) -> None:
        """Set columns of the row with this key."""
        name = "path" if table == "checkpoints" else "id"
        changes = ", ".join(f"{column} = ?" for column in columns)
        self._tables.execute(f"UPDATE {table} SET {changes} WHERE {name} = ?", [*columns.values(), key])

    def find(self, table: str, **columns: Any) -> Any:
        """Return the first row with these values; None if there is none."""
        return next(iter(self.select(table, **columns)), None)

    def select(self, table: str, order: str = "rowid", **columns: Any) -> list[sqlite3.Row]:
        """Return the rows with these values, in the order of a column."""
        conditions = " AND ".join(f"{column} IS ?" for column in columns) or "1"
        statement = f"SELECT * FROM {table} WHERE {conditions} ORDER BY {order}"
        return self._tables.execute(statement, list(columns.values())).fetchall()

    def remove(self, table: str, **columns: Any) -> None:
        """Delete the rows with these values."""
        conditions = " AND ".join(f"{column} IS ?" for column in columns)
        self._tables.execute(f"DELETE FROM {table} WHERE {conditions}", list(columns.values()))

    def total(self, statement: str, *values: Any) -> Any:
        """Return the number that a SELECT of one number gives."""
        return self._tables.execute(statement, values).fetchone()[0]

    def forget_bodies(self, model: str, applied: int) -> None:
        """Record that a snapshot has all requests of a model up to number `applied`: their bodies are not needed."""
        self._tables.execute("UPDATE models SET applied = ? WHERE id = ?", [applied, model])
        self._tables.execute("UPDATE requests SET body = NULL WHERE subject = ? AND seq <= ?", [model, applied])

    def remove_old(self) -> None:
        """Delete results, recorded sequences and samplers' requests that are older than a day."""
        oldest = time.time() - KEPT
        self._tables.execute(
            "DELETE FROM requests WHERE created < ? AND (body IS NULL OR kind = 'sample') "
            "AND (result IS NOT NULL OR error IS NOT NULL)",
            [oldest],
        )
        self._tables.execute("DELETE FROM sequences WHERE created < ?", [oldest])


class Checkpoints:
    """The saved weights of all tenants.

    Args:
        folder: of the server.
    """

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.root, self.journal = folder / "checkpoints", journal

    def make_path(self, model: str, kind: str, name: str, *, overwrite: bool = False) -> str:
        """Return the path of a new checkpoint.

        Args:
            kind: save, sampler or external.

        Raises:
            ValueError: the name is not a file name, or is taken.
        """
        path = f"tinker://{model}/{SEGMENTS[kind]}/{name}"
        self.folder_of(path)
        if not overwrite and self.journal.find("checkpoints", path=path) is not None:
            raise ValueError(f"{path} exists: choose another name, or pass overwrite=True to save_state")
        return path

    def folder_of(self, path: str) -> Path:
        """Return the folder of a path.

        Raises:
            ValueError: the path is malformed.
        """
        match = PATH.fullmatch(path)
        if match is None or match["name"] in (".", ".."):
            raise ValueError(
                f"not a path of a checkpoint: {path!r}; they are tinker://MODEL/weights/NAME, and a name has letters, "
                "digits, '_', '-' and '.' only"
            )
        return self.root / match["model"].replace(":", "-") / match["segment"] / match["name"]

    def record(self, path: str, model: str, owner: str, config: Any, size: int, settings: Mapping[str, Any]) -> None:
        """Record a checkpoint that was written."""
        self.journal.remove("checkpoints", path=path)
        ttl = settings.get("ttl_seconds")
        self.journal.add(
            "checkpoints",
            path=path,
            model=model,
            kind=TYPES[path.split("/")[3]],
            owner=owner,
            config=config,
            metadata=settings.get("user_metadata"),
            created=time.time(),
            expires=None if ttl is None else time.time() + ttl,
            bytes=size,
        )

    def find(self, path: str, owner: str, *, own: bool = False) -> Any:
        """Return the row of a checkpoint that this owner may read; with `own` one that it may change.

        Raises:
            ValueError: there is none.
        """
        self.remove_expired()
        row = self.journal.find("checkpoints", path=path)
        if row is None or (row["owner"] != owner and (own or not row["public"])):
            raise ValueError(f"there is no checkpoint {path}")
        return row

    def remove(self, path: str) -> None:
        """Delete a checkpoint and its folder."""
        self.journal.remove("checkpoints", path=path)
        shutil.rmtree(self.folder_of(path), ignore_errors=True)

    def remove_expired(self) -> None:
        """Delete the checkpoints whose time is over."""
        for row in self.journal.select("checkpoints"):
            if row["expires"] is not None and row["expires"] < time.time():
                self.remove(row["path"])


def describe_checkpoint(row: Any) -> dict[str, Any]:
    """Return a checkpoint as the protocol lists it."""
    _, _, _, segment, name = row["path"].split("/")
    return {
        "checkpoint_id": f"{segment}/{name}",
        "checkpoint_type": row["kind"],
        "time": to_time(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["bytes"],
        "public": bool(row["public"]),
        "user_metadata": from_json(row["metadata"]),
        "expires_at": None if row["expires"] is None else to_time(row["expires"]),
    }


def check_ttl(seconds: int | None) -> None:
    """Raise a ValueError if a checkpoint cannot live so long."""
    if seconds is not None and not MIN_TTL <= seconds <= MAX_TTL:
        raise ValueError(f"ttl_seconds must be {MIN_TTL} (an hour) to ten years, or null, got {seconds}")


def to_time(seconds: float) -> str:
    """Return seconds since 1970 as the protocol writes a time.

    >>> to_time(0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def from_json(text: str | None) -> Any:
    """Return the value of a JSON column; None if it is empty."""
    return None if text is None else json.loads(text)
