"""A server for clients of every dialect, whose traffic is recorded: `forge serve MODEL --record FOLDER`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forge.envs.dialogue import Dialogue
from forge.models.tokenizer import open_tokenizer
from forge.system.web import guard, web

from .gateway import Gateway, client_key
from .policies import Policy
from .recording import GB, Recording
from .session import Session
from .settings import SessionSettings

# A request looks for its turn among those of its session: 1024 turns cost milliseconds. Their lines are on disk.
MAX_TURNS = 1024
MAX_SESSIONS = 256
MAX_OPEN = 512  # requests of a session at once: as many as connections
NO_LIMIT = 1 << 40  # the engine's own limits hold


class RecordingGateway(Gateway):
    """Answers all that may call, and records the exact tokens.

    Conversations are found by their histories, within a client's session. Without `key` a session is what clients send
    as their key. With it, clients send the key itself, or `KEY:NAME` for a separate session.

    Args:
        policy: a service of `forge.actors.Generator`.
        name: of the model for clients.
        key: the API key that clients must send.
    """

    def __init__(self, policy: Any, dialogue: Dialogue, name: str, recording: Recording, key: str | None) -> None:
        super().__init__({name: Policy(policy, dialogue)})
        self.journal = recording
        self.key = key

    def access(self, host: str) -> Any:
        """The middleware that says who may call: with a key those that have it, else programs of this machine."""
        return guard(host, self.key, key_of=self._server_key)

    def _server_key(self, request: web.Request) -> str:
        """The text that a client sends as its key, without the name of the session."""
        text = client_key(request)
        size = len(self.key or "")
        return text[:size] if text[size : size + 1] == ":" else text

    def _session_of(self, request: web.Request) -> Session:
        # Clients may send the key of a provider by mistake: a digest is what is kept of it.
        name = hashlib.sha256(client_key(request).encode(errors="surrogateescape")).hexdigest()[:12]
        session = self.sessions.pop(name, None)
        if session is None or session.turns >= MAX_TURNS:
            settings = SessionSettings(
                seed=secrets.randbits(48),
                max_turns=NO_LIMIT,
                max_tokens=NO_LIMIT,
                seconds=float("inf"),
                max_open=MAX_OPEN,
                is_served=True,
            )
            # One that makes room for another still answers its open requests.
            session = self._session(f"{name}-{secrets.token_hex(3)}", settings)
        # In the order of use: the first is the one that was idle for longest.
        self.sessions[name] = session
        if len(self.sessions) > MAX_SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        return session


def recorder(
    model: str, name: str, folder: str, gigabytes: float, key: str | None
) -> Callable[[Any], RecordingGateway]:
    """The function that makes the server of a service of generators. All that can be wrong is found before they start.

    Args:
        model: the folder of the model.
        folder: of the recording.
        gigabytes: its limit.

    Raises:
        ValueError: as of `Dialogue` and `Recording`.
    """
    tokenizer = open_tokenizer(model)
    dialogue = Dialogue(tokenizer)
    recording = Recording(Path(folder), Path(model), tokenizer, int(gigabytes * GB))
    return partial(RecordingGateway, dialogue=dialogue, name=name, recording=recording, key=key)
