"""`forge serve MODEL`: serves a model with the APIs of OpenAI and Anthropic."""

import argparse
import asyncio
import hashlib
import os
import secrets
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forge.models.architecture import max_length
from forge.models.tokenizer import model_config, open_tokenizer
from forge_envs.dialogue import Dialogue
from forge_http.web import bind_socket, guard_requests, required_key, web

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

ENGINE_OPTIONS = {
    "engine": "embedded or vllm",
    "slots": "sequences that one engine decodes at once",
    "max_seq_len": "prompt and completion together; the model's own if not given",
    "dtype": "float32 or bfloat16, of weights and cache",
}


class ModelServer(Gateway):
    """A gateway that serves one model, and creates a session for each client.

    The turn that a request continues is looked for among the turns of its client's session. Without `key`, clients with
    the same API key share a session, whatever the key is. With it, clients send the key, or `KEY:NAME` for a separate
    session.

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

    def access(self, host: str) -> Any:
        """Return the middleware that rejects requests without the API key; if no key is set, requests of other
        machines."""
        return guard_requests(host, self.key, key_of=self._server_key)

    def _server_key(self, request: web.Request) -> str:
        """Return the API key of a request without the name of a session: KEY of `KEY:NAME`."""
        # Split by length: the server's key may itself have colons.
        sent_key = client_key(request)
        size = len(self.key or "")
        return sent_key[:size] if sent_key[size : size + 1] == ":" else sent_key

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


def add_to(commands: Any) -> None:
    """Add the command `forge serve` to the subparsers `commands`."""
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

    # SUPPRESS: an option that is not given is not passed on, and the engine's default applies.
    for name, about in ENGINE_OPTIONS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int if name in ("slots", "max_seq_len") else str,
            default=argparse.SUPPRESS,
            help=about,
        )

    parser.set_defaults(run=serve_model)


def serve_model(args: argparse.Namespace) -> None:
    """Start the engines, then serve until interrupted.

    Raises:
        SystemExit: an option is invalid, the model or an engine cannot be started; the message is one line.
    """
    # Imported here: they take seconds, which other commands need not wait.
    from forge.engines import EngineSettings
    from forge.models.find import check_family, resolve_model
    from forge.runtime.controller import ForgeError, run

    # All settings are checked before the engines start, which takes a minute.
    try:
        key = required_key(args.host, args.api_key)
        options = {name: getattr(args, name) for name in ENGINE_OPTIONS if hasattr(args, name)}
        EngineSettings(**options).check_installed()
        check_family(args.model)
        model = resolve_model(args.model)
        tokenizer = open_tokenizer(model)
        name = args.name or Path(args.model).resolve().name
        longest = options.get("max_seq_len") or max_length(model_config(model))
        make_server = partial(ModelServer, tokenizer=tokenizer, name=name, key=key, longest=longest)
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
    from forge.runtime.controller.home import private_folder
    from forge.system.scratch import remove_tree

    policy = await Generator.options(num_replicas=args.replicas, with_gpus=args.with_gpus).as_service(model, **options)
    async with make_server(policy).listen(listener) as url:
        # Anthropic's clients add /v1 to their base URL, OpenAI's do not.
        print(f"{name} is served at {url}/v1 (OpenAI) and {url} (Anthropic)", flush=True)
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        number = await signals.get()
    # Nothing has to be saved: the engines end with this process, and to stop them one by one would take seconds.
    print(f"forge: {number.name}: ended", flush=True)
    remove_tree(private_folder())
    os._exit(128 + number)
