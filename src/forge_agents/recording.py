"""Traffic of a server in a folder, from which `forge_agents.recorded` makes rows of exact tokens."""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from forge.system.checksums import file_digest
from forge.system.files import write_atomic
from forge_agents.recorded import RECORDING, TRAFFIC, vocabulary_digest

from .journal import Journal, Json

GB = 1_000_000_000
log = logging.getLogger(f"forge.{__name__}")


class Recording(Journal):
    """The events of all sessions of one server, in a new file of the folder. A line is on disk before the client hears
    of its turn.

    Recording ends, and serving continues, where the folder reaches its limit or the disk is full: a warning says so.

    Args:
        folder: created, or one of the same model, which is appended to. Only this user reads it.
        model: the folder of the model.
        tokenizer: of it.
        limit: most bytes of the folder's traffic.

    Raises:
        ValueError: the folder holds something else, the traffic of another model, or as much as the limit.
    """

    def __init__(self, folder: Path, model: Path, tokenizer: Any, limit: int) -> None:
        identity = {"weights": weights_digest(model), "tokenizer": vocabulary_digest(tokenizer)}
        described = folder / RECORDING
        if described.exists():
            _check_model(described, identity)
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds something else than recorded traffic: name a new folder")
        super().__init__(folder)
        self.limit = limit
        self.size = sum(file.stat().st_size for file in folder.glob(TRAFFIC))
        if self.size >= limit:
            raise ValueError(f"{folder} has {_gb(self.size)} of traffic, its limit is {_gb(limit)}: {REMEDY}")
        if not described.exists():
            text = json.dumps({"model": str(model), **identity}, indent=1)
            write_atomic(described, f"{text}\n", durable=True)
        name = TRAFFIC.replace("*", f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
        self._descriptor = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._lock = threading.Lock()
        self._is_open = True

    def write(self, key: str, *events: Json) -> None:
        """Append events of a session, and wait until they are on disk."""
        data = "".join(json.dumps({"session": key, **event}) + "\n" for event in events).encode()
        with self._lock:
            if not self._is_open:
                return
            if self.size + len(data) > self.limit:
                self._end(f"{self.folder} has {_gb(self.size)} of traffic, and its limit is {_gb(self.limit)}")
                return
            self.size += len(data)
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
                os.fdatasync(self._descriptor)
            except OSError as error:
                # A part of a line may be on disk: nothing may follow it.
                self._end(f"{self.folder} cannot be written: {error.strerror}")

    def forget(self, key: str) -> None:
        """Nothing: what was recorded stays."""

    def _end(self, reason: str) -> None:
        self._is_open = False
        log.warning("traffic is no longer recorded: %s; %s", reason, REMEDY)


REMEDY = "start again with a larger --record-gb, or with another folder"


def weights_digest(model: Path) -> str:
    """The identity of a model's weights: a digest of its weight files."""
    files = sorted([*model.glob("*.safetensors"), *model.glob("*.bin")])
    return "-".join(file_digest(file) for file in files)


def _check_model(described: Path, identity: dict[str, str]) -> None:
    try:
        recorded = json.loads(described.read_text())
        differing = [name for name, value in identity.items() if recorded[name] != value]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{described} is damaged: name a new folder") from None
    if differing:
        raise ValueError(
            f"{described.parent} is of {recorded['model']}, whose {' and '.join(differing)} differ: name a new folder"
        )


def _gb(size: int) -> str:
    return f"{size / GB:.3g} GB"
