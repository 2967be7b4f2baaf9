"""A journal of sessions, so that a gateway which dies comes back with them. A file for each session, of one line for
each event, written to disk before the client hears of it."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from forge.types import Completion

from .messages import Call
from .settings import SessionSettings
from .tree import TokenRun

Json = dict[str, Any]


class Journal:
    """The journal of one gateway.

    Args:
        folder: where its files are; created. They hold the secrets of sessions, so that only this user reads them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files: dict[str, int] = {}

    def write(self, key: str, *events: Json) -> None:
        """Append events of a session, and wait until they are on disk."""
        descriptor = self._files.get(key)
        if descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            descriptor = self._files[key] = os.open(self._path(key), flags, 0o600)
        text = "".join(json.dumps(event) + "\n" for event in events)
        view = memoryview(text.encode())
        while view:
            view = view[os.write(descriptor, view) :]
        os.fdatasync(descriptor)

    def read(self) -> Iterator[tuple[str, list[Json]]]:
        """The key and the events of each session that has not ended. A line that was cut by a death is not an event."""
        for path in sorted(self.folder.glob("*.jsonl")):
            events = []
            lines = path.read_bytes().split(b"\n")
            for line in lines[:-1]:
                events.append(json.loads(line))
            if lines[-1]:
                # The next event begins a new line.
                os.truncate(path, path.stat().st_size - len(lines[-1]))
            if events:
                yield path.stem, events

    def forget(self, key: str) -> None:
        """Remove a session's file; it may be gone."""
        if (descriptor := self._files.pop(key, None)) is not None:
            os.close(descriptor)
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.jsonl"


def opened(settings: SessionSettings, ends_at: float) -> Json:
    """The event of a new session; `ends_at` in seconds since the epoch."""
    return {"kind": "open", "settings": asdict(settings), "ends_at": ends_at}


def sampled(policy: str, run: TokenRun) -> Json:
    """The event of a turn."""
    turn = run.completion
    completion = {
        "token_ids": turn.token_ids,
        "logprobs": turn.logprobs,
        "versions": turn.versions,
        "finish": turn.finish,
        "identities": list(turn.identities.items()),
        "sampled_by": turn.sampled_by,
        "experts": _packed(turn.experts),
    }
    fields = {name: getattr(run, name) for name in ("number", "parent", "context", "id", "reason", "rule")}
    fields |= {"difference": run.difference, "is_constrained": run.is_constrained, "tools": list(run.tools)}
    fields |= {"key": run.key.hex(), "added": [_plain(message) for message in run.added]}
    return {"kind": "turn", "policy": policy, "run": fields, "completion": completion}


def delivered(ids: Sequence[str]) -> Json:
    """The event of an answer that a client has received."""
    return {"kind": "delivered", "ids": list(ids)}


def run_of(event: Json) -> TokenRun:
    """The turn of an event of `sampled`."""
    completion = {**event["completion"]}
    completion["identities"] = {int(version): name for version, name in completion["identities"]}
    completion["experts"] = _unpacked(completion["experts"])
    fields = {**event["run"]}
    fields["added"] = tuple(_message(message) for message in fields["added"])
    fields |= {"context": tuple(fields["context"]), "tools": tuple(fields["tools"])}
    fields["key"] = bytes.fromhex(fields["key"])
    return TokenRun(completion=Completion(**completion), **fields)


def _plain(message: Mapping[str, Any]) -> Json:
    calls = message.get("calls")
    return {**message, **({"calls": [asdict(call) for call in calls]} if calls else {})}


def _message(plain: Json) -> Json:
    calls = plain.get("calls")
    return {**plain, **({"calls": [Call(**call) for call in calls]} if calls else {})}


def _packed(experts: np.ndarray | None) -> Json | None:
    if experts is None:
        return None
    return {"shape": experts.shape, "bytes": base64.b64encode(experts.tobytes()).decode()}


def _unpacked(packed: Json | None) -> np.ndarray | None:
    if packed is None:
        return None
    return np.frombuffer(base64.b64decode(packed["bytes"]), np.uint8).reshape(packed["shape"]).copy()
