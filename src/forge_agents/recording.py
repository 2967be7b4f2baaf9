"""Traffic of a server in a folder, from which `forge_agents.recorded` makes rows of exact tokens."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge.system.files import write_atomic

from .recorded import RECORDING, TRAFFIC, vocabulary_digest
from .tree import TokenRun

log = logging.getLogger(f"forge.{__name__}")


class Recording:
    """The events of all sessions of one server, in a new file of the folder. A turn is on disk before its client hears
    of it. On a full disk recording ends with a warning, and serving continues.

    Args:
        folder: created, or one of the same tokenizer, which is appended to. Only this user reads it.
        model: the folder of the model.
        tokenizer: of it.

    Raises:
        ValueError: the folder holds something else, or the traffic of a model with another tokenizer.
    """

    def __init__(self, folder: Path, model: Path, tokenizer: Any) -> None:
        identity = {"model": str(model), "tokenizer": vocabulary_digest(tokenizer)}
        described = folder / RECORDING
        if described.exists():
            recorded = json.loads(described.read_text())
            if recorded["tokenizer"] != identity["tokenizer"]:
                raise ValueError(f"{folder} is of {recorded['model']}, whose tokenizer differs: name a new folder")
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds something else than recorded traffic: name a new folder")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(described, f"{json.dumps(identity, indent=1)}\n", durable=True)
        name = TRAFFIC.replace("*", f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
        self.path = folder / name
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._is_open = True

    def write_turns(self, session: str, runs: Sequence[TokenRun]) -> None:
        """Append new turns of a session, and wait until they are on disk."""
        for run in runs:
            fields = {name: getattr(run, name) for name in ("number", "parent", "context", "id", "added")}
            turn = run.completion
            self._write(kind="turn", session=session, **fields, sampled=turn.token_ids, logprobs=turn.logprobs)

    def write_delivered(self, ids: Sequence[str]) -> None:
        """Append that a client has received these answers."""
        self._write(kind="delivered", ids=ids)

    def _write(self, **event: Any) -> None:
        if not self._is_open:
            return
        view = memoryview((json.dumps(event, default=asdict) + "\n").encode())
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fdatasync(self._descriptor)
        except OSError as error:
            # A part of a line may be on disk: nothing may follow it.
            self._is_open = False
            log.warning("traffic is no longer recorded: %s cannot be written: %s", self.path, error.strerror)
