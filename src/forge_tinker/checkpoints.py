"""Checkpoints of the protocol: paths such as `tinker://MODEL/weights/NAME`, and the folders that they stand for."""

import re
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .journal import Journal, from_json

SEGMENTS = {"save": "weights", "sampler": "sampler_weights", "external": "external_weights"}
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
PATH = re.compile(
    r"tinker://(?P<model>[\w:-]+)/(?P<segment>weights|sampler_weights|external_weights)/(?P<name>[\w.-]+)"
)
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 24 * 3600  # seconds


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
        if PATH.fullmatch(path) is None or name in (".", ".."):
            raise ValueError(f"the name of a checkpoint has letters, digits, '_', '-' and '.' only, got {name!r}")
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
            raise ValueError(f"not a path of a checkpoint: {path!r}; they are tinker://MODEL/weights/NAME")
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
