"""One WebSocket to an OpenEnv server, which is one session with an environment of its own."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from forge.envs.environment import InfrastructureError

from ..content import function_schema

LARGEST = 100 << 20  # bytes of one message, as in OpenEnv's own client
CLOSING = 1.0  # seconds in which a server may answer that a connection ends
# After these the server ends the session; INFRASTRUCTURE_ERROR is said by servers of this library alone.
_ENDING = ("FACTORY_ERROR", "SESSION_ERROR", "INFRASTRUCTURE_ERROR")


class OpenEnvError(Exception):
    """The server refuses a message, or its environment has raised.

    Attributes:
        code: such as VALIDATION_ERROR for an action that does not fit the schema, EXECUTION_ERROR for an environment
            that raised.
    """

    def __init__(self, code: str, message: str, url: str) -> None:
        super().__init__(f"{url}: {code}: {message}")
        self.code, self.message = code, message


class CapacityError(InfrastructureError):
    """The server has as many sessions as it takes. It may have room later."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to a reset or a step. `reward` is None where it gave none."""

    observation: dict[str, Any]
    reward: float | None
    done: bool
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """From the wire. InfrastructureError: the reward is no finite number."""
        reward, observation = data.get("reward"), data.get("observation")
        try:
            number = None if reward is None else float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if number is not None and not math.isfinite(number):
            raise InfrastructureError(f"the server gave the reward {str(reward)[:80]!r}, which is no finite number")
        return cls(
            observation if isinstance(observation, dict) else {"value": observation},
            number,
            bool(data.get("done")),
            data.get("metadata") or {},
        )


class Session:
    """Calls one after the other. Whatever leaves a reply outstanding ends the connection: the next call would get it.

    Every call raises InfrastructureError if the connection is lost or nothing is said within `timeout` seconds, and
    OpenEnvError if the server refuses; only after the latter the session can still be used.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout: float) -> None:
        self._url, self._timeout = url, timeout
        self._socket: aiohttp.ClientWebSocketResponse | None = socket
        self._busy = False
        self._closing: asyncio.Task[Any] | None = None

    @property
    def lost(self) -> bool:
        return self._socket is None or self._socket.closed

    @property
    def idle(self) -> bool:
        """It is there, and no call waits."""
        return not self.lost and not self._busy

    async def reset(self, **parameters: Any) -> Reply:
        """Begin an episode, with what the environment's reset takes, such as seed= and episode_id=."""
        return Reply.read(await self._ask("reset", "observation", parameters))

    async def step(self, action: Mapping[str, Any]) -> Reply:
        """Take an action of the form that the server's schema names."""
        return Reply.read(await self._ask("step", "observation", dict(action)))

    async def state(self) -> dict[str, Any]:
        """What the environment tells of its state, at least episode_id and step_count."""
        return await self._ask("state", "state")

    async def list_tools(self) -> tuple[dict[str, Any], ...]:
        """The MCP tools of the environment, as OpenAI writes schemas. OpenEnvError: it has none."""
        try:
            # Unlike a step of type list_tools this takes no turn of the environment, but old servers do not know it.
            asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            answer = await self._ask("mcp", "mcp", asked)
            if "error" in answer:
                raise OpenEnvError("MCP_ERROR", str(answer["error"].get("message")), self._url)
            tools = answer["result"]["tools"]
        except OpenEnvError as error:
            if error.code != "UNKNOWN_TYPE":
                raise
            tools = (await self.step({"type": "list_tools"})).observation.get("tools", [])
        return tuple(map(function_schema, tools))

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Call an MCP tool as a step of the environment; its observation has `result`, or an `error`."""
        return await self.step({"type": "call_tool", "tool_name": name, "arguments": dict(arguments)})

    async def close(self) -> None:
        """End the session. It may be repeated."""
        if self._socket is not None and self.idle:
            with suppress(aiohttp.ClientError, ConnectionError, TimeoutError):  # it is lost, which is as good
                async with asyncio.timeout(CLOSING):
                    await self._socket.send_str('{"type":"close"}')
        self.drop()
        if self._closing is not None:
            await self._closing

    def drop(self) -> None:
        """End the connection, without a word to the server."""
        socket, self._socket = self._socket, None
        if socket is not None:
            # Not waited for: it takes as long as a server that hangs. The task is kept so that it is not collected.
            self._closing = asyncio.ensure_future(socket.close())

    async def _ask(self, kind: str, expected: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._busy:
            raise RuntimeError(f"a session takes one call at a time: {kind} was called while another call waits")
        if self._socket is None:
            raise InfrastructureError(f"the session with {self._url} is over")
        text = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        self._busy = True
        try:
            async with asyncio.timeout(self._timeout) as limit:
                # A server that refuses a session says why and ends it, maybe before it was asked anything.
                with suppress(aiohttp.ClientError, ConnectionError):
                    await self._socket.send_str(text)
                received = await self._socket.receive()
        except TimeoutError:
            self.drop()
            if not limit.expired():
                raise
            raise InfrastructureError(f"{self._url} did not answer {kind} within {self._timeout:g} s") from None
        except BaseException:
            self.drop()
            raise
        finally:
            self._busy = False
        if received.type is not aiohttp.WSMsgType.TEXT:
            self.drop()
            raise InfrastructureError(f"{self._url} ended the connection instead of answering {kind}")
        return self._read(received.data, kind, expected)

    def _read(self, text: str, kind: str, expected: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
            said, data = answer["type"], answer["data"]
        except (ValueError, KeyError, TypeError):
            self.drop()
            raise InfrastructureError(f"{self._url} answered {kind} with {text[:80]!r}") from None
        if said == "error":
            raise self._refusal(data)
        if said != expected or not isinstance(data, dict):
            self.drop()
            raise InfrastructureError(f"{self._url} answered {kind} with a message of type {said!r}")
        return data

    def _refusal(self, data: dict[str, Any]) -> Exception:
        code, message = str(data.get("code")), str(data.get("message"))
        if code == "CAPACITY_REACHED":
            self.drop()
            most = data.get("max_sessions", "its limit of")
            return CapacityError(
                f"{self._url} takes {most} sessions at a time and has them: start it with a higher max_concurrent_envs "
                "(1 unless it is set), or lower `sessions` of the client"
            )
        if code in _ENDING:
            self.drop()
            if code == "INFRASTRUCTURE_ERROR":
                return InfrastructureError(f"{self._url}: {message}")
        details = f" {json.dumps(data['errors'])[:500]}" if data.get("errors") else ""
        return OpenEnvError(code, message + details, self._url)
