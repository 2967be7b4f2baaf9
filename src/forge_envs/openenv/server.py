"""An environment of this library, served to OpenEnv's clients."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from forge.envs.environment import Environment

from .served import Data, Refused, ServedSession, read_message, write_message
from .session import CLOSING, LARGEST
from .wire import SCHEMA

log = logging.getLogger(__name__)


class Server:
    """What `web_app` serves: an environment for each WebSocket, one for all resets and steps over HTTP together, and
    one for each session that an MCP client asks for over HTTP, which it may share with a WebSocket."""

    def __init__(
        self,
        make: Callable[[], Environment],
        task: Callable[[int], Any],
        metadata: Data,
        max_sessions: int,
        idle: float,
        timeout: float,
    ) -> None:
        self._make, self._task, self._metadata = make, task, metadata
        self._most, self._idle, self._timeout = max_sessions, idle, timeout
        self._sockets: set[web.WebSocketResponse] = set()
        self._open: set[ServedSession] = set()
        self._named: dict[str, ServedSession] = {}  # those over HTTP; "" is that of resets and steps
        self._reapers: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._told({"status": "healthy"})),
            web.get("/metadata", self._told(self._metadata)),
            web.get("/schema", self._told(SCHEMA)),
            web.get("/state", self._over_http),
            web.post("/reset", self._over_http),
            web.post("/step", self._over_http),
            web.post("/mcp", self._mcp),
            web.get("/ws", self._socket),
        ]

    async def close(self, _: web.Application) -> None:
        """End all sessions."""
        going = (socket.close(code=aiohttp.WSCloseCode.GOING_AWAY) for socket in self._sockets)
        await asyncio.gather(*going, return_exceptions=True)
        for name in list(self._named):
            await self._end_named(name)

    def _told(self, what: Data) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response(what)

        return answer

    def _begin(self) -> ServedSession:
        taken = len(self._open)
        if taken >= self._most:
            full = f"Server at capacity: {taken}/{self._most} sessions active"
            raise Refused("CAPACITY_REACHED", full, last=True, active_sessions=taken, max_sessions=self._most)
        try:
            session = ServedSession(self._make(), self._task, self._timeout)
        except Exception as error:
            log.exception("no environment could be made")
            raise Refused("FACTORY_ERROR", f"{type(error).__name__}: {error}", last=True) from error
        self._open.add(session)
        return session

    async def _end(self, session: ServedSession) -> None:
        self._open.discard(session)
        try:
            async with asyncio.timeout(self._timeout):
                await session.environment.close()
        except Exception:
            log.exception("%s.close failed", type(session.environment).__name__)

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(timeout=CLOSING, max_msg_size=LARGEST, compress=False)
        await socket.prepare(request)
        name = request.query.get("session_id")
        try:
            session = self._begin() if name is None else self._of(name)
        except Refused as refused:
            await socket.send_json({"type": "error", "data": refused.data})
            await socket.close()
            return socket
        self._sockets.add(socket)
        try:
            await self._converse(socket, session, name)
        except ConnectionError:
            log.info("a client went away in the middle of an answer")
        finally:
            self._sockets.discard(socket)
            if name is None:
                await self._end(session)
            await socket.close()
        return socket

    async def _converse(self, socket: web.WebSocketResponse, session: ServedSession, name: str | None) -> None:
        while True:
            try:
                message = await socket.receive(self._idle)
            except TimeoutError:
                return  # nobody has used it for long
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            try:
                kind, data = read_message(message.data)
                if kind == "close":
                    return
                if name is not None:
                    session = self._of(name)
                said, answer = await session.answer(kind, data)
                text = write_message({"type": said, "data": answer})
            except Refused as refused:
                await socket.send_json({"type": "error", "data": refused.data})
                if refused.last:
                    return
            else:
                await socket.send_str(text)

    async def _over_http(self, request: web.Request) -> web.Response:
        kind = request.path.strip("/")
        try:
            data = (await request.json() if request.can_read_body else {}) if kind != "state" else {}
            if not isinstance(data, dict) or (kind == "step" and not isinstance(data.get("action"), dict)):
                raise ValueError('the body must be an object, and that of a step have an "action"')
        except ValueError as error:
            return web.json_response({"detail": str(error)}, status=422)
        try:
            if "" not in self._named:
                self._named[""] = self._begin()
            _, answer = await self._of("").answer(kind, data["action"] if kind == "step" else data)
            return web.json_response(text=write_message(answer))
        except Refused as refused:
            if refused.last:
                await self._end_named("")
            status = {"VALIDATION_ERROR": 422, "CAPACITY_REACHED": 503, "INFRASTRUCTURE_ERROR": 503}
            body = {"detail": refused.data["message"], "code": refused.data["code"]}
            return web.json_response(body, status=status.get(refused.data["code"], 500))

    async def _mcp(self, request: web.Request) -> web.Response:
        """JSON-RPC: what MCP clients of OpenEnv ask for, `tools/list` and `tools/call` in a session that they made."""
        answer: Data = {"jsonrpc": "2.0", "id": None}
        try:
            asked = json.loads(await request.text())
            answer["id"], params = asked.get("id"), asked.get("params") or {}
            if asked.get("method") == "openenv/session/create":
                name = secrets.token_hex(16)
                self._named[name] = self._begin()
                self._of(name)
                return web.json_response({**answer, "result": {"session_id": name}})
            name = str(params.get("session_id"))
            session = self._of(name)
            if asked.get("method") == "openenv/session/close":
                await self._end_named(name)
                return web.json_response({**answer, "result": {"session_id": name, "closed": True}})
            return web.json_response(text=write_message((await session.answer("mcp", asked))[1]))
        except Refused as refused:
            return web.json_response({**answer, "error": {"code": -32000, "message": str(refused)}})
        except (ValueError, AttributeError) as error:
            return web.json_response({**answer, "error": {"code": -32700, "message": f"no JSON-RPC request: {error}"}})

    def _of(self, name: str) -> ServedSession:
        """The session of this name, which was used now."""
        if name not in self._named:
            raise Refused("SESSION_ERROR", f"Unknown session_id: {name}", last=True)
        if name in self._reapers:
            self._reapers[name].cancel()
        self._reapers[name] = asyncio.get_running_loop().call_later(self._idle, self._reap, name)
        return self._named[name]

    def _reap(self, name: str) -> None:
        if self._named[name].busy:
            self._of(name)
            return
        task = asyncio.ensure_future(self._end_named(name))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_named(self, name: str) -> None:
        if name in self._reapers:
            self._reapers.pop(name).cancel()
        if (session := self._named.pop(name, None)) is not None:
            await self._end(session)


def web_app(
    make: Callable[[], Environment],
    *,
    task: Callable[[int], Any] = lambda seed: None,
    name: str = "",
    description: str = "",
    version: str | None = None,
    max_sessions: int = 32,
    idle: float = 600.0,
    timeout: float = 60.0,
) -> web.Application:
    """An application that speaks OpenEnv's wire format.

    A reset's `task`, or else its parameters but for `seed` and `episode_id`, is the task of the episode. A step takes
    {"text": ...} as the schema tells, or {"type": "call_tool", "tool_name": ..., "arguments": ...}.

    Args:
        make: an environment, once for each session.
        task: what is played if a reset names none, from its seed.
        name, description, version: what /metadata tells; the name is that of `make` by default.
        max_sessions: more are refused with CAPACITY_REACHED.
        idle: seconds without a message after which a session is ended.
        timeout: seconds in which an environment must answer; one that does not is an infrastructure failure, and its
            session ends.

    Raises:
        ValueError: a setting that cannot be.
    """
    if max_sessions < 1 or min(idle, timeout) <= 0:
        raise ValueError("max_sessions must be at least 1, and idle and timeout above 0 seconds")
    called = name or getattr(make, "__name__", type(make).__name__)
    metadata = {"name": called, "description": description or (make.__doc__ or called).strip(), "version": version}
    server = Server(make, task, metadata, max_sessions, idle, timeout)
    app = web.Application(client_max_size=LARGEST)
    app.add_routes(server.routes())
    app.on_shutdown.append(server.close)
    return app


@asynccontextmanager
async def serve(
    make: Callable[[], Environment], *, host: str = "127.0.0.1", port: int = 0, **settings: Any
) -> AsyncIterator[str]:
    """`async with serve(make) as url:` until the block ends; port 0 is a free one, `settings` go to `web_app`."""
    runner = web.AppRunner(web_app(make, **settings), shutdown_timeout=5.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        listening = runner.addresses[0]
        yield f"http://{listening[0]}:{listening[1]}"
    finally:
        await runner.cleanup()
