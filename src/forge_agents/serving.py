"""A model behind the addresses of OpenAI and Anthropic, for clients of every dialect: `forge serve MODEL`."""

import argparse
import asyncio
import hashlib
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forge.models.tokenizer import open_tokenizer
from forge_envs.dialogue import Dialogue
from forge_http.web import bind_socket, guard_requests, required_key, web

from .gateway import Gateway, client_key
from .policies import Policy
from .session import Session
from .settings import SessionSettings

# A request looks for its turn among its session's: 1024 turns cost milliseconds. Their lines are on disk.
MAX_TURNS = 1024
MAX_SESSIONS = 256
MAX_OPEN = 512  # requests of a session at once: as many as connections
HEALTH_TIMEOUT = 10.0  # seconds for the engines' stats
NO_LIMIT = 1 << 40  # the engine's own limits hold

ENGINE_OPTIONS = {
    "engine": "embedded or vllm",
    "slots": "sequences that one engine decodes at once",
    "max_seq_len": "prompt and completion together; the model's own if not given",
    "dtype": "float32 or bfloat16, of weights and cache",
}


class ModelServer(Gateway):
    """Answers all that may call.

    Conversations are found by their histories, within a client's session. Without `key` a session is what clients send
    as their key. With it, clients send the key itself, or `KEY:NAME` for a separate session.

    Args:
        policy: a service of `forge.actors.Generator`.
        tokenizer: of the model.
        name: of the model for clients.
        key: the API key that clients must send.
    """

    def __init__(self, policy: Any, tokenizer: Any, name: str, key: str | None = None) -> None:
        try:
            dialogue, chat_error = Dialogue(tokenizer), ""
        except ValueError as error:
            dialogue, chat_error = Dialogue(tokenizer, "plain"), str(error)
        super().__init__({name: Policy(policy, dialogue, chat_error=chat_error)})
        self.key = key

    def _make_application(self, host: str) -> web.Application:
        app = super()._make_application(host)
        app.router.add_get("/health", self._report_health)
        return app

    async def _report_health(self, _: web.Request) -> web.Response:
        (policy,) = self.policies.values()
        engines = await policy.service.stats.options(timeout=HEALTH_TIMEOUT).fanout()
        return web.json_response({"status": "ok", "engines": engines})

    def access(self, host: str) -> Any:
        """Return the middleware that says who may call: with a key those that have it, else programs of this
        machine."""
        return guard_requests(host, self.key, key_of=self._server_key)

    def _server_key(self, request: web.Request) -> str:
        """Return the text that a client sends as its key, without the name of the session."""
        text = client_key(request)
        size = len(self.key or "")
        return text[:size] if text[size : size + 1] == ":" else text

    def _session_of(self, request: web.Request) -> Session:
        # Clients may send the key of a provider by mistake: only its digest is kept.
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
            session = self._make_session(f"{name}-{secrets.token_hex(3)}", settings)

        # In the order of use: the first is the one that was idle for longest.
        self.sessions[name] = session
        if len(self.sessions) > MAX_SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        return session


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to OpenAI clients",
        description="Serve a model to clients of OpenAI and Anthropic until it is interrupted: chat, responses, "
        "messages and completions, streaming, log-probabilities.",
        epilog="example: forge serve runs/quickstart/model --port 8000",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="folder or hub id; runs/x/model is what a run leaves behind")
    parser.add_argument("--name", help="what clients call the model; its folder's name if not given")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; other machines' clients need a key")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--api-key", help="what clients must send; other users of this machine can read it here, not in FORGE_API_KEY"
    )

    parser.add_argument("--replicas", type=int, default=1, help="engines that requests are balanced over")
    parser.add_argument("--with-gpus", action="store_true", help="give each engine a GPU")

    # Without a default, the engine's own holds.
    for name, about in ENGINE_OPTIONS.items():
        kind = int if name in ("slots", "max_seq_len") else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS, help=about)

    parser.set_defaults(run=serve_model)


def serve_model(args: argparse.Namespace) -> None:
    """Start the engines, then serve until interrupted. SystemExit: an error, in one line."""
    from forge.engines import EngineSettings
    from forge.models.find import check_family, resolve_model
    from forge.runtime.controller import ForgeError, run

    # What can be wrong is found before the engines start, which takes a minute.
    try:
        key = required_key(args.host, args.api_key)
        options = {name: getattr(args, name) for name in ENGINE_OPTIONS if hasattr(args, name)}
        EngineSettings(**options).check_installed()
        check_family(args.model)
        model = resolve_model(args.model)
        tokenizer = open_tokenizer(model)
        name = args.name or Path(args.model).resolve().name
        make_server = partial(ModelServer, tokenizer=tokenizer, name=name, key=key)
        with bind_socket(args.host, args.port) as listener:
            run(_serve_policy(args, model, name, make_server, options, listener))
    except (ForgeError, ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from None


async def _serve_policy(
    args: argparse.Namespace,
    model: str,
    name: str,
    make_server: Callable[[Any], ModelServer],
    options: dict[str, object],
    listener: socket.socket,
) -> None:
    from forge.actors import Generator

    policy = await Generator.options(num_replicas=args.replicas, with_gpus=args.with_gpus).as_service(model, **options)
    async with make_server(policy).listen(listener) as url:
        # Clients of Anthropic add more to their base URL than OpenAI's.
        print(f"{name} is served at {url}/v1 (OpenAI) and {url} (Anthropic)", flush=True)
        await asyncio.Event().wait()
