"""A server of this library's environments for clients of OpenEnv."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from forge_envs.environment import Environment, InfrastructureError, Step
from forge_http.web import answer_constant, bind_socket, guard_requests, required_key, serve_application

from ..content import Json
from .wire import CLOSE_LIMIT, MAX_MESSAGE, SCHEMA, action_from_json, reply_to_json

log = logging.getLogger(f"forge.{__name__}")

Data = dict[str, Json]


class ServedError(Exception):
    """An error that is sent to the client.

    Args:
        code: OpenEnv's name of the error.
        last: whether the session ends after it.
        fields: further fields of the error message.
    """

    def __init__(self, code: str, message: str, last: bool = False, **fields: Json) -> None:
        super().__init__(message)
        self.data = {"message": message, "code": code, **fields}
        self.last = last


@dataclass(eq=False)
class ServedSession:
    """An environment that is served to one client, and the state of its episode.

    Args:
        timeout: seconds for one call of the environment.
    """

    environment: Environment
    timeout: float
    running: bool = False
    steps: int = 0
    episode: str | None = None

    async def answer(self, kind: str, data: Data) -> tuple[str, Data]:
        """Return the type and the data of the reply to a message; ServedError if the reply is an error."""
        if kind == "state":
            return "state", {"episode_id": self.episode, "step_count": self.steps}
        if kind == "reset":
            return "observation", await self._reset_episode(data)
        if kind == "step":
            return "observation", await self._step_episode(data)
        raise ServedError("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _reset_episode(self, data: Data) -> Data:
        parameters = dict(data)
        seed, episode_id = parameters.pop("seed", None), parameters.pop("episode_id", None)
        # Without a seed, each episode gets a random one.
        seed = secrets.randbits(31) if seed is None else seed
        if not isinstance(seed, int):
            raise ServedError("VALIDATION_ERROR", f"seed must be an integer, got {seed!r}")
        # If the reset fails there is no episode: a step must not act in the previous one.
        self.running = False
        task = parameters.get("task", parameters or None)
        reply = await self._call_tool(self.environment.reset(task, seed=seed), "reset")
        self.steps = 0
        self.episode = str(episode_id or secrets.token_hex(16))
        return reply

    async def _step_episode(self, data: Data) -> Data:
        try:
            action = action_from_json(data)
        except ValueError as error:
            raise ServedError("VALIDATION_ERROR", str(error)) from None
        if not self.running:
            raise ServedError("EXECUTION_ERROR", "no episode has started: send reset first")
        reply = await self._call_tool(self.environment.step(action), "step")
        self.steps += 1
        return reply

    async def _call_tool(self, call: Awaitable[Step], name: str) -> Data:
        """Return the reply's data for a call of the environment; ServedError if it fails, or the answer is not JSON."""
        try:
            async with asyncio.timeout(self.timeout):
                step = await call
            reply = reply_to_json(step)
        except InfrastructureError as error:
            raise ServedError("INFRASTRUCTURE_ERROR", str(error), last=True) from error
        except TimeoutError:
            raise ServedError(
                "INFRASTRUCTURE_ERROR", f"{name} gave no answer within {self.timeout:g} s", last=True
            ) from None
        except Exception as error:
            log.exception("%s of %s failed", name, type(self.environment).__name__)
            raise ServedError("EXECUTION_ERROR", f"{type(error).__name__}: {error}") from error
        self.running = not step.done
        return reply


def _read_message(text: str) -> tuple[str, Data]:
    """Return the type and the data of a client's message; ServedError if it is not a JSON object with these fields."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServedError("INVALID_JSON", f"Invalid JSON: {error}") from None
    data = message.get("data", {}) if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise ServedError("VALIDATION_ERROR", "a message must be an object with a type and an object data")
    return str(message.get("type", "")), data


@dataclass(eq=False)
class OpenEnvServer:
    """Server of the WebSocket connections of `web_app`, each with a separate environment; arguments as for
    `web_app`."""

    make: Callable[[], Environment]
    max_sessions: int
    idle: float
    timeout: float
    active: int = 0  # sessions

    async def answer(self, request: web.Request) -> web.WebSocketResponse:
        """Answer the messages of one connection until it ends; the first message makes its environment."""
        socket = web.WebSocketResponse(timeout=CLOSE_LIMIT, max_msg_size=MAX_MESSAGE, compress=False)
        await socket.prepare(request)
        session: ServedSession | None = None

        try:
            while (received := await socket.receive(self.idle)).type is aiohttp.WSMsgType.TEXT:
                try:
                    kind, data = _read_message(received.data)
                    if kind == "close":
                        break
                    # Not when the connection is opened: environments may be expensive.
                    session = session or self._begin_session()
                    reply_kind, answer = await session.answer(kind, data)
                    await socket.send_json({"type": reply_kind, "data": answer})
                except ServedError as error:
                    await socket.send_json({"type": "error", "data": error.data})
                    if error.last:
                        break
        except (ConnectionError, TimeoutError) as error:
            log.info("a session ended with an error: %r", error)
        finally:
            if session is not None:
                await self._end_session(session)
            await socket.close()

        return socket

    def _begin_session(self) -> ServedSession:
        if self.active >= self.max_sessions:
            raise ServedError(
                "CAPACITY_REACHED",
                f"Server at capacity: {self.active}/{self.max_sessions} sessions active",
                last=True,
                max_sessions=self.max_sessions,
            )
        try:
            session = ServedSession(self.make(), self.timeout)
        except Exception as error:
            log.exception("making an environment failed")
            raise ServedError("FACTORY_ERROR", f"{type(error).__name__}: {error}", last=True) from error
        self.active += 1
        return session

    async def _end_session(self, session: ServedSession) -> None:
        self.active -= 1
        try:
            async with asyncio.timeout(self.timeout):
                await session.environment.close()
        except Exception:
            log.exception("%s.close failed", type(session.environment).__name__)


def web_app(
    make: Callable[[], Environment],
    *,
    host: str = "127.0.0.1",
    key: str | None = None,
    max_sessions: int = 32,
    idle: float = 600.0,
    timeout: float = 60.0,
) -> web.Application:
    """Return an aiohttp application that serves environments to clients of OpenEnv.

    The task of an episode is the reset's parameter `task`; without it, the mapping of the parameters other than `seed`
    and `episode_id`, or None if there are no others. An action is {"text": ..., "calls": [...]}, see SCHEMA. The
    observation of the reset has the schemas of the tools.

    Args:
        make: makes an environment; called for each session.
        host: the address at which the application will be served.
        key: the API key that clients must send; None: they need none, see `forge_http.web`.
        max_sessions: how many sessions may be open; further ones are rejected with CAPACITY_REACHED.
        idle: seconds without a message after which a session is ended.
        timeout: seconds for one call of an environment, after which the session ends with INFRASTRUCTURE_ERROR.
    """
    server = OpenEnvServer(make, max_sessions, idle, timeout)
    name = getattr(make, "__name__", type(make).__name__)
    metadata = {"name": name, "description": (make.__doc__ or name).strip(), "version": None}

    app = web.Application(client_max_size=MAX_MESSAGE, middlewares=[guard_requests(host, key)])
    constants: dict[str, Data] = {"/health": {"status": "healthy"}, "/metadata": metadata, "/schema": SCHEMA}
    app.add_routes([web.get(path, partial(answer_constant, content)) for path, content in constants.items()])
    app.add_routes([web.get("/ws", server.answer)])

    return app


@asynccontextmanager
async def serve(
    make: Callable[[], Environment], *, host: str = "127.0.0.1", port: int = 0, key: str | None = None, **settings: Any
) -> AsyncIterator[str]:
    """Serve environments within the block, and yield the server's url: `async with serve(make) as url:`.

    Args:
        make: makes an environment; called for each session.
        host: the address to listen at.
        port: the port to listen at; 0: any free port.
        key: the API key that clients must send; None: the one of `forge_http.web.required_key`.
        settings: further arguments of `web_app`.

    Raises:
        ValueError: other machines can reach `host`, and there is no key.
        OSError: the address is not available.
    """
    key = required_key(host, key)
    async with serve_application(web_app(make, host=host, key=key, **settings), bind_socket(host, port)) as url:
        yield url
