"""A client of OpenEnv servers, by HTTP for metadata and by WebSocket for sessions; and servers on this machine.

The client of the openenv package is not used: it needs fastapi, gradio and fastmcp, and takes 3 s to import.
"""

import asyncio
import json
import os
import random
import signal
import socket
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Self

import aiohttp

from forge.runtime.process import end_with_parent
from forge_envs.environment import InfrastructureError

from ..content import Json, check_command, function_schema, tail_of
from .wire import CLOSE_LIMIT, MAX_MESSAGE, Reply, check_shape, to_plain

FIRST_PAUSE = 0.05  # seconds before the second attempt to start a session; doubles with each attempt
MAX_PAUSE = 2.0
CONNECT_TIMEOUT = 10.0  # seconds for one attempt


class OpenEnvError(Exception):
    """Error: the OpenEnv server rejected a message, or its environment raised an exception.

    Attributes:
        code: OpenEnv's name of the error: VALIDATION_ERROR for an action that violates the schema, EXECUTION_ERROR for
            an exception of the environment, and others.
    """

    def __init__(self, code: str, message: str, url: str) -> None:
        super().__init__(f"{url}: {code}: {message}")
        self.code = code
        self.message = message


class CapacityError(InfrastructureError):
    """Error: the OpenEnv server is at its session limit; a later attempt may succeed."""


class Session:
    """A WebSocket connection to one environment of the server, whose methods must be called one after the other.

    A call raises InfrastructureError if the connection is lost or there is no answer within `timeout` seconds, and
    OpenEnvError if the server rejects it. Only after an OpenEnvError can the session be used again.

    Attributes:
        lost: whether the session has ended, or cannot be used: after an answer that was wrong, late or cancelled, the
            next call could receive the answer to the earlier one.
    """

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout: float, slots: asyncio.Semaphore
    ) -> None:
        self._socket = socket
        self._url = url
        self._timeout = timeout
        self._slots = slots
        self._closed = False
        self.lost = False

    async def reset(self, **parameters: Json) -> Reply:
        """Start an episode, with the parameters of the environment's reset, such as seed= and episode_id=."""
        return Reply.read(await self._send_request("reset", "observation", parameters))

    async def step(self, action: Mapping[str, Json]) -> Reply:
        """Take an action, which must match the server's schema."""
        return Reply.read(await self._send_request("step", "observation", action))

    async def state(self) -> dict[str, Json]:
        """Return the environment's state, which has at least episode_id and step_count."""
        return await self._send_request("state", "state", {})

    async def list_tools(self) -> tuple[dict[str, Json], ...]:
        """Return the environment's MCP tools as schemas in OpenAI's format; OpenEnvError if it has none."""
        reply = await self._send_request(
            "mcp", "mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        )
        if "error" in reply:
            raise OpenEnvError("MCP_ERROR", str(reply["error"]), self._url)
        try:
            schemas = tuple(map(function_schema, reply["result"]["tools"]))
            check_shape({"messages": [], "tools": list(schemas)}, "observation")
        except (KeyError, TypeError, AttributeError, ValueError):
            raise InfrastructureError(f"{self._url} answered tools/list with {str(reply)[:80]!r}") from None
        return schemas

    async def close(self) -> None:
        """End the session, so that the client can start another one; no effect if it has ended."""
        if not self._closed:
            self._closed = self.lost = True
            self._slots.release()
            await self._socket.close()

    async def _send_request(self, kind: str, expected: str, data: Mapping[str, Json]) -> dict[str, Json]:
        """Send a message of type `kind`, and return the data of the reply, which must be of type `expected`."""
        if self.lost:
            raise InfrastructureError(f"the session with {self._url} has ended")
        text = json.dumps({"type": kind, "data": data}, default=to_plain)

        # Set until the answer is read: after a cancelled call, the next call would receive this call's answer.
        self.lost = True
        try:
            async with asyncio.timeout(self._timeout):
                # A server may send an error and close before it reads anything, so read it even if sending fails.
                with suppress(aiohttp.ClientError, ConnectionError):
                    await self._socket.send_str(text)
                received = await self._socket.receive()
        except TimeoutError:
            raise InfrastructureError(f"{self._url} did not answer {kind} within {self._timeout:g} s") from None

        if received.type is not aiohttp.WSMsgType.TEXT:
            raise InfrastructureError(f"{self._url} closed the connection instead of answering {kind}")
        try:
            reply = json.loads(received.data)
            content, received_type = dict(reply["data"]), reply["type"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InfrastructureError(f"{self._url} answered {kind} with {received.data[:80]!r}") from None

        if received_type not in (expected, "error"):
            raise InfrastructureError(f"{self._url} answered {kind} with a message of type {received_type!r}")
        self.lost = False
        if received_type == "error":
            raise self._make_error(content)

        return content

    def _make_error(self, content: dict[str, Json]) -> Exception:
        """Return the exception for an error reply; the session is lost if the server ends it after this error."""
        code, message = str(content.get("code")), str(content.get("message"))
        self.lost = code in ("CAPACITY_REACHED", "INFRASTRUCTURE_ERROR", "FACTORY_ERROR", "SESSION_ERROR")
        if code == "CAPACITY_REACHED":
            return CapacityError(
                f"{self._url} takes {content.get('max_sessions', 'its limit of')} sessions at a time, all in use: "
                "start it with a higher max_concurrent_envs (default 1), or lower `sessions` of the client"
            )
        if code == "INFRASTRUCTURE_ERROR":
            return InfrastructureError(f"{self._url}: {message}")
        details = f" {json.dumps(content['errors'])[:500]}" if content.get("errors") else ""
        return OpenEnvError(code, message + details, self._url)


class OpenEnvClient(AbstractAsyncContextManager["OpenEnvClient", None]):
    """A client of one server, which must be used in the event loop of its first use.

    Args:
        url: the server's address, such as http://127.0.0.1:8000.
        sessions: how many sessions may be open at once; further calls of `acquire` wait.
        timeout: seconds for the answer to one message.
        patience: seconds for which `acquire` waits for a free session, and retries a server that is down or full.
        headers: HTTP headers for every request, such as an authorization.

    Raises:
        ValueError: the url does not start with http, https, ws or wss.
        InfrastructureError: by all methods: there is no connection, or no answer in time.
    """

    def __init__(
        self,
        url: str,
        *,
        sessions: int = 32,
        timeout: float = 60.0,
        patience: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if url.startswith(("ws://", "wss://")):  # as the openenv package's clients write it
            url = url.replace("ws", "http", 1)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the url of an OpenEnv server must start with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        self._max_sessions = sessions
        self._timeout = timeout
        self._patience = patience
        self._headers = headers
        self._http: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(sessions)

    async def health(self) -> str:
        """Return the health that the server reports: "healthy", "degraded" or "unhealthy"."""
        return str((await self._get_json("/health")).get("status"))

    async def schema(self) -> dict[str, Json]:
        """Return the server's JSON schemas of its "action", "observation" and "state", under these keys."""
        return await self._get_json("/schema")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Yield a session of `acquire`, and close it after the block."""
        session = await self.acquire()
        try:
            yield session
        finally:
            await session.close()

    async def acquire(self) -> Session:
        """Start a session, which the caller must close.

        Raises:
            InfrastructureError: no session could be started within `patience` seconds.
            OpenEnvError: the server failed to make its environment.
        """
        pause, deadline = FIRST_PAUSE, asyncio.get_running_loop().time() + self._patience
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._slots.acquire()
            except TimeoutError:
                raise InfrastructureError(
                    f"none of the {self._max_sessions} sessions with {self.url} was closed within "
                    f"{self._patience:g} s: raise `sessions`, or close them earlier"
                ) from None

            try:
                return await self._begin_session()
            except BaseException as error:
                self._slots.release()
                is_over = asyncio.get_running_loop().time() + pause > deadline
                if is_over or not isinstance(error, InfrastructureError):
                    raise

            # A random part of the pause, so that clients that were rejected together do not retry together.
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, MAX_PAUSE)

    async def close(self) -> None:
        """Close all connections, so that pending calls fail; the next call opens new ones."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _begin_session(self) -> Session:
        """Open a connection, and return it as a session once the server has answered on it."""
        close_timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_LIMIT)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                socket = await self._connect_socket().ws_connect(
                    f"{self.url}/ws", max_msg_size=MAX_MESSAGE, timeout=close_timeout, compress=0
                )
        except (aiohttp.ClientError, OSError) as error:  # OSError includes TimeoutError
            reason = str(error) or f"no connection within {CONNECT_TIMEOUT:g} s"
            raise InfrastructureError(f"no session with {self.url}: {reason}") from error

        session = Session(socket, self.url, self._timeout, self._slots)
        try:
            await session.state()
        except BaseException as error:
            # An environment that raises an exception for its state has answered, and can be used.
            if not isinstance(error, OpenEnvError) or session.lost:
                await socket.close()
                raise

        return session

    async def _get_json(self, path: str) -> dict[str, Json]:
        limit = aiohttp.ClientTimeout(total=self._timeout, connect=CONNECT_TIMEOUT)
        try:
            async with self._connect_socket().get(self.url + path, timeout=limit, allow_redirects=False) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or f"no answer within {self._timeout:g} s"
            raise InfrastructureError(f"{self.url}{path}: {reason}") from error
        try:
            document: Any = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if response.status != 200 or not isinstance(document, dict):
            raise InfrastructureError(f"{self.url}{path} answered with status {response.status}: {text[:500]!r}")
        return document

    def _connect_socket(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self._http


GRACE = 5.0  # seconds from SIGTERM to SIGKILL


@dataclass(eq=False)
class LocalServer(AbstractAsyncContextManager["LocalServer", None]):
    """A server process on this machine, which ends when this process ends for any reason.

        async with await LocalServer.start(["uvicorn", "server.app:app", "--port", "{port}"]) as server:
            env = OpenEnvEnvironment(OpenEnvClient(server.url))

    Attributes:
        url: the server's address.
        process: the server, which leads its process group.
        log: the file with what it prints.
    """

    process: Process
    log: IO[bytes]
    url: str

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        limit: float = 60.0,
    ) -> Self:
        """Start a server, and return it once it is healthy.

        Args:
            command: program and arguments; {port} is replaced by a free port of 127.0.0.1, at which it must listen.
            cwd: its working directory; None: this process's.
            env: environment variables in addition to this process's.
            limit: seconds within which it must be healthy.

        Raises:
            ValueError: the command has no {port}.
            InfrastructureError: the server exited, or was not healthy in time; the message has the end of its log.
        """
        check_command(command)
        if not any("{port}" in word for word in command):
            raise ValueError("the command must contain {port} as a placeholder for the port")
        # The port is free again when the block ends; the server opens it soon after.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        program, *arguments = [word.replace("{port}", port) for word in command]
        log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - it is closed with the server
        parent = os.getpid()

        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *arguments,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(parent),
            )
        except OSError as error:
            log.close()
            raise InfrastructureError(f"{program}: {error.strerror}") from error

        server = cls(process, log, f"http://127.0.0.1:{port}")
        try:
            await server._wait_healthy(program, limit)
        except BaseException:
            await server.stop()
            raise

        return server

    async def stop(self) -> None:
        """Send SIGTERM to the server's process group, and SIGKILL after at most 5 s to its remaining processes."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), GRACE)
        self.log.close()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _wait_healthy(self, program: str, limit: float) -> None:
        status, deadline = "no answer", asyncio.get_running_loop().time() + limit
        async with OpenEnvClient(self.url, timeout=limit) as client:
            while status != "healthy":
                try:
                    status = await client.health()
                except InfrastructureError as error:
                    status = str(error)

                code = self.process.returncode
                if code is not None:
                    problem = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                elif asyncio.get_running_loop().time() > deadline:
                    problem = f"was not healthy within {limit:g} s ({status})"
                else:
                    await asyncio.sleep(0.1)
                    continue
                raise InfrastructureError(f"{program} {problem}; its log ends with:\n{tail_of(self.log)}")
