"""Serve an environment of this library to OpenEnv's clients."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from forge.envs.environment import Environment, InfrastructureError, Step
from forge.system.web import bind, guard, listen, required_key

from ..content import Json
from .tasks import TaskLists, TaskSets
from .wire import CLOSE_LIMIT, MAX_MESSAGE, SCHEMA, action_from_json, as_number, reply_to_json

log = logging.getLogger(__name__)

Data = dict[str, Json]
TaskOfSeed = Callable[[int], Any]
FIRST_MESSAGE_LIMIT = 10.0  # seconds for the first message of a WebSocket
API_VERSION = "1.0.0"  # of OpenEnv's HTTP interface, which `openenv validate` reads from /openapi.json
_OPERATION = {"responses": {"200": {"description": "JSON, as OpenEnv's clients read it"}}}
# All other errors are status 500.
_HTTP_STATUS = {"VALIDATION_ERROR": 422, "CAPACITY_REACHED": 503, "INFRASTRUCTURE_ERROR": 503}


class ServedError(Exception):
    """An error reported to the client. `last`: the session ends with it."""

    def __init__(self, code: str, message: str, last: bool = False, **fields: Json) -> None:
        super().__init__(message)
        self.data = {"message": message, "code": code, **fields}
        self.last = last


class ServedSession:
    """An environment and the state of its episode. Calls are serialised."""

    def __init__(self, environment: Environment, task: TaskOfSeed, lists: TaskLists, timeout: float) -> None:
        self.environment = environment
        self._task = task
        self._lists = lists
        self._timeout = timeout
        self._first: Step | None = None
        self._running = False
        self._steps = 0
        self._episode = ""
        self._turn = asyncio.Lock()
        self.reaper: asyncio.TimerHandle | None = None  # of a session over HTTP

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return self._turn.locked()

    async def answer(self, kind: str, data: Data) -> tuple[str, Data]:
        """Return type and data of the reply to a message. ServedError: an error reply."""
        async with self._turn:
            if kind == "reset":
                return "observation", await self._reset(data)
            if kind == "step" and data.get("type") == "list_tools":
                return "observation", {"observation": {"tools": self._tools()}, "reward": None, "done": False}
            if kind == "step":
                return "observation", await self._step(data)
            if kind == "mcp":
                return "mcp", await self._mcp(data)
            if kind == "state":
                return "state", {"episode_id": self._episode or None, "step_count": self._steps}
        raise ServedError("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    def _tools(self, schema_key: str = "input_schema") -> list[Data]:
        """Return the episode's tools as MCP describes them; `schema_key` is the key of their parameters."""
        schemas = self.environment.offered if self._first is None else self._first.tools
        if schemas is None:
            raise ServedError("EXECUTION_ERROR", "reset first: the tools are those of an episode")
        functions = [tool["function"] for tool in schemas]
        return [
            {"name": f["name"], "description": f.get("description", ""), schema_key: f.get("parameters", {})}
            for f in functions
        ]

    async def _reset(self, data: Data) -> Data:
        parameters = dict(data)
        seed = parameters.pop("seed", None)
        episode = parameters.pop("episode_id", None)
        # Without a seed each episode is another one.
        seed = secrets.randbits(31) if seed is None else seed
        if not isinstance(seed, int):
            raise ServedError("VALIDATION_ERROR", f"seed must be an integer, got {seed!r}")
        task = self._task_of(parameters) if parameters else self._task(seed)
        # Until the reset has succeeded there is no episode: a step would act in the former one.
        self._running = False
        step = await self._limited(self.environment.reset(task, seed=seed), "reset")
        self._first = step
        self._running = not step.done
        self._steps = 0
        self._episode = str(episode or secrets.token_hex(16))
        with _json_errors():
            return reply_to_json(step)

    def _task_of(self, parameters: Data) -> Json:
        if not self._lists.has(parameters):
            return parameters.get("task", parameters)
        try:
            return self._lists.task(parameters)
        except ValueError as error:
            raise ServedError("VALIDATION_ERROR", str(error)) from None

    async def _step(self, data: Data) -> Data:
        try:
            action = action_from_json(data)
        except ValueError as error:
            raise ServedError("VALIDATION_ERROR", str(error)) from None
        if not self._running:
            raise ServedError("EXECUTION_ERROR", "no episode is under way: reset first")
        step = await self._limited(self.environment.step(action), "step")
        self._running = not step.done
        self._steps += 1
        # Converted before the answer is sent: values without a JSON form are the environment's fault.
        with _json_errors():
            reply = reply_to_json(step)
        # An observation of OpenEnv's MCP environments has the result of the tool instead of messages.
        if data.get("type") == "call_tool":
            result = "\n".join(str(message.get("content", "")) for message in step.messages)
            metadata = reply["observation"]["metadata"]
            reply["observation"] = {"tool_name": data["tool_name"], "result": result, "error": None}
            reply["observation"]["metadata"] = metadata
        return reply

    async def _mcp(self, data: Data) -> Data:
        method = data.get("method")
        params = data.get("params") or {}
        if not isinstance(params, dict):
            raise ServedError("VALIDATION_ERROR", f"params must be an object, got {params!r:.80}")
        response = {"jsonrpc": "2.0", "id": data.get("id")}
        try:
            if method == "tools/list":
                return {**response, "result": {"tools": self._tools("inputSchema")}}
            if method == "tools/call":
                # A call by MCP is a step like any other: it counts, and it may end the episode.
                call = {"tool_name": params.get("name"), "arguments": params.get("arguments", {})}
                text = (await self._step({"type": "call_tool", **call}))["observation"]["result"]
                content = [{"type": "text", "text": text}]
                return {**response, "result": {"content": content, "data": text, "is_error": False}}
        except ServedError as error:
            # The session is over: the caller must know, not the MCP client alone.
            if error.last:
                raise
            return {**response, "error": {"code": -32603, "message": str(error)}}
        return {**response, "error": {"code": -32601, "message": f"Method not found: {method}"}}

    async def _limited(self, call: Awaitable[Step], name: str) -> Step:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return await call
        except InfrastructureError as error:
            raise ServedError("INFRASTRUCTURE_ERROR", str(error), last=True) from error
        except TimeoutError as error:
            # The environment's own TimeoutError is an error like others, after which the session continues.
            if limit.expired():
                message = f"{name} gave no answer within {self._timeout:g} s"
                raise ServedError("INFRASTRUCTURE_ERROR", message, last=True) from None
            raise ServedError("EXECUTION_ERROR", repr(error)) from error
        except Exception as error:
            log.exception("%s of %s failed", name, type(self.environment).__name__)
            raise ServedError("EXECUTION_ERROR", f"{type(error).__name__}: {error}") from error


@contextmanager
def _json_errors() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ServedError("EXECUTION_ERROR", f"the environment's step has no JSON form: {error}") from error


def _dumps(answer: Data) -> str:
    with _json_errors():
        return json.dumps(answer, default=as_number)


class OpenEnvServer:
    """The handlers of `web_app`: an environment per WebSocket, one for all resets and steps over HTTP, and one per
    session that an MCP client creates over HTTP, which a WebSocket may join by `session_id`."""

    def __init__(
        self,
        make: Callable[[], Environment],
        task: TaskOfSeed,
        lists: TaskLists,
        metadata: Data,
        max_sessions: int,
        idle: float,
        timeout: float,
    ) -> None:
        self._make = make
        self._task = task
        self._lists = lists
        self._metadata = metadata
        self._max_sessions = max_sessions
        self._idle = idle
        self._timeout = timeout
        self._sockets: set[web.WebSocketResponse] = set()
        self._open: set[ServedSession] = set()
        self._named: dict[str, ServedSession] = {}  # over HTTP; "" is that of resets and steps
        self._ending: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        """Routes of OpenEnv's HTTP and WebSocket protocol."""

        def constant(content: Data) -> Callable[[web.Request], Awaitable[web.Response]]:
            async def answer(_: web.Request) -> web.Response:
                return web.json_response(content)

            return answer

        routes = [
            web.get("/health", constant({"status": "healthy"})),
            web.get("/metadata", constant(self._metadata)),
            web.get("/schema", constant(SCHEMA)),
            web.get("/state", self._over_http),
            web.post("/reset", self._over_http),
            web.post("/step", self._over_http),
            web.post("/mcp", self._mcp),
            *self._lists.routes(),
        ]
        # `openenv validate` reads the paths from here; what they take and return is at /schema.
        paths = {route.path: {route.method.lower(): _OPERATION} for route in routes}
        info = {"title": self._metadata["name"], "version": API_VERSION}
        openapi = constant({"openapi": "3.1.0", "info": info, "paths": paths})
        return [*routes, web.get("/openapi.json", openapi), web.get("/ws", self._socket)]

    async def close(self, _: web.Application) -> None:
        """End all sessions."""
        closing = (socket.close(code=aiohttp.WSCloseCode.GOING_AWAY) for socket in self._sockets)
        await asyncio.gather(*closing, return_exceptions=True)
        for name in list(self._named):
            await self._end_named(name)

    def _begin(self) -> ServedSession:
        active = len(self._open)
        if active >= self._max_sessions:
            # With the limit, which clients show to their users.
            message = f"Server at capacity: {active}/{self._max_sessions} sessions active"
            raise ServedError(
                "CAPACITY_REACHED", message, last=True, active_sessions=active, max_sessions=self._max_sessions
            )
        try:
            session = ServedSession(self._make(), self._task, self._lists, self._timeout)
        except Exception as error:
            log.exception("making an environment failed")
            raise ServedError("FACTORY_ERROR", f"{type(error).__name__}: {error}", last=True) from error
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
        socket = web.WebSocketResponse(timeout=CLOSE_LIMIT, max_msg_size=MAX_MESSAGE, compress=False)
        await socket.prepare(request)
        self._sockets.add(socket)
        sessions: list[ServedSession] = []
        try:
            await self._converse(socket, request.query.get("session_id"), sessions)
        except ConnectionError:
            log.info("a client disconnected during an answer")
        finally:
            # Environments may hold processes: they end with the connection.
            self._sockets.discard(socket)
            for session in sessions:
                await self._end(session)
            await socket.close()
        return socket

    async def _converse(self, socket: web.WebSocketResponse, name: str | None, sessions: list[ServedSession]) -> None:
        """Answer messages. The first one begins the session, which goes to `sessions`: silent sockets hold none."""
        while True:
            # A socket that is open and silent has a shorter limit than a session, which waits for its policy.
            limit = self._idle if sessions or name is not None else min(FIRST_MESSAGE_LIMIT, self._idle)
            # Twice half the limit: after a stop of this process the first one has passed unseen.
            received = await _receive(socket, limit / 2) or await _receive(socket, limit / 2)
            if received is None or received.type is not aiohttp.WSMsgType.TEXT:
                return
            try:
                try:
                    message = json.loads(received.data)
                except (ValueError, RecursionError) as error:
                    raise ServedError("INVALID_JSON", f"Invalid JSON: {error}") from None
                data = message.get("data", {}) if isinstance(message, dict) else None
                if not isinstance(data, dict):
                    raise ServedError("VALIDATION_ERROR", "a message must be an object with a type and an object data")
                kind = str(message.get("type", ""))
                if kind == "close":
                    return
                # Environments may be expensive: none is made before a message asks for it.
                if name is None and not sessions:
                    sessions.append(self._begin())
                session = sessions[0] if name is None else self._named_session(name)
                reply_kind, answer = await session.answer(kind, data)
                text = _dumps({"type": reply_kind, "data": answer})
            except ServedError as error:
                await socket.send_json({"type": "error", "data": error.data})
                if error.last:
                    return
            else:
                await socket.send_str(text)

    async def _over_http(self, request: web.Request) -> web.Response:
        kind = request.path.strip("/")
        try:
            data = json.loads(await request.text() or "{}") if kind != "state" else {}
            if not isinstance(data, dict) or (kind == "step" and not isinstance(data.get("action"), dict)):
                raise ValueError('the body must be an object, and that of a step have an "action"')
        except (ValueError, RecursionError, LookupError) as error:  # LookupError: an unknown charset
            return web.json_response({"detail": str(error)}, status=422)
        try:
            if "" not in self._named:
                self._named[""] = self._begin()
            _, response = await self._named_session("").answer(kind, data["action"] if kind == "step" else data)
            return web.json_response(text=_dumps(response))
        except ServedError as error:
            if error.last:
                await self._end_named("")
            code = error.data["code"]
            body = {"detail": error.data["message"], "code": code}
            return web.json_response(body, status=_HTTP_STATUS.get(code, 500))

    async def _mcp(self, request: web.Request) -> web.Response:
        """JSON-RPC of OpenEnv's MCP clients: sessions, and `tools/list` and `tools/call` in them."""
        answer: Data = {"jsonrpc": "2.0", "id": None}
        try:
            request_body = json.loads(await request.text())
            answer["id"] = request_body.get("id")
            params = request_body.get("params") or {}
            if request_body.get("method") == "openenv/session/create":
                name = secrets.token_hex(16)
                self._named[name] = self._begin()
                # Starts the idle timer.
                self._named_session(name)
                return web.json_response({**answer, "result": {"session_id": name}})
            name = str(params.get("session_id"))
            session = self._named_session(name)
            if request_body.get("method") == "openenv/session/close":
                await self._end_named(name)
                return web.json_response({**answer, "result": {"session_id": name, "closed": True}})
            return web.json_response(text=_dumps((await session.answer("mcp", request_body))[1]))
        except ServedError as error:
            return web.json_response({**answer, "error": {"code": -32000, "message": str(error)}})
        except (ValueError, AttributeError, RecursionError, LookupError) as error:
            return web.json_response({**answer, "error": {"code": -32700, "message": f"no JSON-RPC request: {error}"}})

    def _named_session(self, name: str) -> ServedSession:
        """Return the named session, with its idle timer restarted."""
        if name not in self._named:
            raise ServedError("SESSION_ERROR", f"Unknown session_id: {name}", last=True)
        session = self._named[name]
        if session.reaper is not None:
            session.reaper.cancel()
        session.reaper = asyncio.get_running_loop().call_later(self._idle / 2, self._reap, name, False)
        return session

    def _reap(self, name: str, is_second_half: bool) -> None:
        """End a session after the second half of its limit, before which a process that was stopped reads messages."""
        session = self._named[name]
        # A call that runs longer than the limit is not an idle session.
        if session.busy:
            self._named_session(name)
            return
        if not is_second_half:
            session.reaper = asyncio.get_running_loop().call_later(self._idle / 2, self._reap, name, True)
            return
        task = asyncio.ensure_future(self._end_named(name))
        self._ending.add(task)  # a reference, or the task may be collected
        task.add_done_callback(self._ending.discard)

    async def _end_named(self, name: str) -> None:
        session = self._named.pop(name, None)
        if session is not None:
            if session.reaper is not None:
                session.reaper.cancel()
            await self._end(session)


async def _receive(socket: web.WebSocketResponse, timeout: float) -> aiohttp.WSMessage | None:
    """Return the next message, or None after `timeout` seconds: after a stop of this process they pass unseen, once."""
    try:
        return await socket.receive(timeout)
    except TimeoutError:
        return None


def web_app(
    make: Callable[[], Environment],
    *,
    task: TaskOfSeed = lambda seed: None,
    tasks: TaskSets | None = None,
    name: str = "",
    description: str = "",
    version: str | None = None,
    host: str = "127.0.0.1",
    key: str | None = None,
    max_sessions: int = 32,
    idle: float = 600.0,
    timeout: float = 60.0,
) -> web.Application:
    """Make an aiohttp application that speaks OpenEnv's wire format.

    The task of an episode is the reset's `task`, or that of its `split` and `index` in `tasks`, or else its parameters
    without `seed` and `episode_id`. A step takes
    {"text": ...} as in the schema, or {"type": "call_tool", "tool_name": ..., "arguments": ...}.

    Args:
        make: an environment, called for each session.
        task: from the seed, the task of a reset without one.
        tasks: by split, as JSON, which clients can list.
        name, description, version: for /metadata; the name defaults to that of `make`.
        host, key: where it will be served, and what clients must send as their API key; see `forge.system.web`.
        max_sessions: more are rejected with CAPACITY_REACHED.
        idle: seconds without a message after which a session is ended.
        timeout: seconds for one call of an environment; exceeding it is an infrastructure error that ends the session.

    Raises:
        ValueError: an invalid setting.
    """
    if max_sessions < 1 or min(idle, timeout) <= 0:
        raise ValueError("max_sessions must be at least 1, and idle and timeout above 0 seconds")
    environment_name = name or getattr(make, "__name__", type(make).__name__)
    metadata = {
        "name": environment_name,
        "description": description or (make.__doc__ or environment_name).strip(),
        "version": version,
    }
    lists = TaskLists(environment_name, tasks)
    server = OpenEnvServer(make, task, lists, metadata, max_sessions, idle, timeout)
    app = web.Application(client_max_size=MAX_MESSAGE, middlewares=[guard(host, key)])
    app.add_routes(server.routes())
    app.on_shutdown.append(server.close)
    return app


@asynccontextmanager
async def serve(
    make: Callable[[], Environment], *, host: str = "127.0.0.1", port: int = 0, key: str | None = None, **settings: Any
) -> AsyncIterator[str]:
    """Serve environments: `async with serve(make) as url:`; port 0 picks a free port, `settings` go to `web_app`.

    Raises:
        ValueError: other machines reach `host`, and there is no key; see `forge.system.web.required_key`.
    """
    key = required_key(host, key)
    async with listen(web_app(make, host=host, key=key, **settings), bind(host, port)) as url:
        yield url
