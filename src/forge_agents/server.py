"""A gateway that serves one model, with the APIs of OpenAI and Anthropic."""

import hashlib
import secrets
from typing import Any

from forge_envs.dialogue import Dialogue
from forge_http.web import web

from .gateway import Gateway, client_key
from .policies import Policy
from .session import Session
from .settings import SessionSettings

# Of a session, before a new one replaces it: a request looks for the turn that it continues among all of them, which
# takes milliseconds for 1024.
MAX_TURNS = 1024
MAX_SESSIONS = 256
MAX_SIZE = 1 << 29  # bytes of the turns of all sessions, beyond which the least recently used one is forgotten
MAX_OPEN = 512  # requests that a session may have open at once
HEALTH_TIMEOUT = 10.0  # seconds within which the engines must report their statistics
NO_LIMIT = 1 << 40  # tokens or turns: only the engine's own limits apply


class ModelServer(Gateway):
    """A gateway that serves one model, and creates a session for each client.

    The turn that a request continues is looked for among the turns of its client's session: clients with the same API
    key share a session, whatever the key is without `key`.

    Args:
        policy: a service of `forge.actors.Generator`.
        tokenizer: the model's tokenizer.
        name: the model's name for clients.
        key: the API key that clients must send; None: any key, or none.
        longest: the tokens that the model takes at most.
    """

    def __init__(self, policy: Any, tokenizer: Any, name: str, key: str | None = None, longest: int = NO_LIMIT) -> None:
        try:
            dialogue, chat_error = Dialogue(tokenizer), ""
        except ValueError as error:
            # No chat template: requests for completions still work, and chats get this error.
            dialogue, chat_error = Dialogue(tokenizer, "plain"), str(error)
        super().__init__({name: Policy(policy, dialogue, chat_error=chat_error)})
        self.key, self.longest = key, longest

    def _make_application(self, host: str) -> web.Application:
        app = super()._make_application(host)
        app.router.add_get("/health", self._report_health)
        return app

    async def _report_health(self, _: web.Request) -> web.Response:
        (policy,) = self.policies.values()
        return web.json_response(
            {"status": "ok", "engines": (await policy.service.stats.options(timeout=HEALTH_TIMEOUT).fanout())}
        )

    def _session_of(self, request: web.Request) -> Session:
        # Only a digest of the key is kept: clients may send their key of another provider by mistake.
        name = hashlib.sha256(client_key(request).encode(errors="surrogateescape")).hexdigest()[:12]
        session = self.sessions.pop(name, None)
        if session is None or session.turns >= MAX_TURNS or session.size > MAX_SIZE // 4:
            settings = SessionSettings(
                seed=secrets.randbits(48),
                max_turns=NO_LIMIT,
                max_tokens=NO_LIMIT,
                max_prompt=self.longest,
                seconds=float("inf"),
                max_open=MAX_OPEN,
                is_served=True,
            )
            # A full session, which this one replaces, still answers the requests that it has open.
            session = self._make_session(f"{name}-{secrets.token_hex(3)}", settings)

        # Inserted at the end, so that the first session is the least recently used.
        self.sessions[name] = session
        while len(self.sessions) > MAX_SESSIONS or sum(kept.size for kept in self.sessions.values()) > MAX_SIZE:
            del self.sessions[next(iter(self.sessions))]
        return session
