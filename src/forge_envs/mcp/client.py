"""What an MCP client says, whatever carries it: initialize, tools/list, tools/call."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from forge.envs.environment import InfrastructureError
from forge.envs.tools import ToolError

from .content import function_schema, text_of

Data = dict[str, Any]

NEWEST = "2025-06-18"
KNOWN = ("2024-11-05", "2025-03-26", NEWEST, "2025-11-25")  # versions in which tools are the same


class RemoteError(Exception):
    """The server answers a request with an error."""


class TookTooLong(Exception):
    """A request was not answered in time; the connection still is what it was."""


class MCPTools(ABC):
    """The tools of one server. Calls may be made at the same time.

    A tool that takes too long is a `ToolError`, as is one that fails or does not exist: the call may be why.
    A server that is gone is an `InfrastructureError`, once; the next call connects anew.
    """

    def __init__(self, name: str, timeout: float, start_timeout: float) -> None:
        if min(timeout, start_timeout) <= 0:
            raise ValueError(f"timeout and start_timeout must be above 0 seconds, got {timeout} and {start_timeout}")
        self.name, self._timeout, self._start_timeout = name, timeout, start_timeout
        self._schemas: tuple[Data, ...] = ()
        self._numbers = itertools.count(1)
        self._opening, self._lost = asyncio.Lock(), ""
        self.version = ""

    async def open(self) -> None:
        """Connect and ask for the tools. Nothing happens if it is connected already.

        InfrastructureError: the server does not answer as MCP asks for within `start_timeout` seconds.
        """
        async with self._opening:
            if not self.connected:
                await self._open()

    async def _open(self) -> None:
        await self.close()
        try:
            await self._connect()
            about = {"protocolVersion": NEWEST, "capabilities": {}, "clientInfo": {"name": "forge", "version": "1"}}
            self.version = str((await self._begin("initialize", about)).get("protocolVersion"))
            if self.version not in KNOWN:
                raise InfrastructureError(
                    f"{self.name} speaks MCP of version {self.version}, not of {', '.join(KNOWN)}"
                )
            await self._notify("notifications/initialized", {})
            self._schemas = tuple(await self._listed())
        except BaseException:
            await self.close()
            raise

    def schemas(self) -> tuple[Data, ...]:
        """What may be called, as OpenAI writes it. RuntimeError: it was not opened."""
        if not self.version:
            raise RuntimeError(f"the tools of {self.name} are not known before `await open()`")
        return self._schemas

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the tool answers, as text.

        ToolError: the tool says that it failed, there is none of this name, or it took more than `timeout` seconds.
        InfrastructureError: the server is gone.
        """
        if not self.connected:
            lost, self._lost = self._lost, ""
            if lost:  # and nobody was told yet, who may count on what the server had kept
                raise InfrastructureError(lost)
            await self.open()
        try:
            result = await self._request("tools/call", {"name": name, "arguments": dict(arguments)}, self._timeout)
        except RemoteError as error:
            raise ToolError(str(error)) from None
        except TookTooLong:
            raise ToolError(f"{name} took more than {self._timeout:g} s") from None
        if result.get("isError"):
            raise ToolError(text_of(result))
        return text_of(result)

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @abstractmethod
    async def close(self) -> None:
        """Let go of the server. It may be repeated, and `open` may follow."""

    @abstractmethod
    async def _connect(self) -> None: ...

    @abstractmethod
    async def _request(self, method: str, params: Data, limit: float) -> Data:
        """The result of a request. RemoteError, TookTooLong, InfrastructureError."""

    @abstractmethod
    async def _notify(self, method: str, params: Data) -> None: ...

    def _why(self) -> str:
        """What is known of the end of the connection."""
        return ""

    async def _listed(self) -> list[Data]:
        tools: list[Data] = []
        cursor: Data = {}
        while True:
            page = await self._begin("tools/list", cursor)
            tools += page.get("tools", [])
            if not page.get("nextCursor"):
                return list(map(function_schema, tools))
            cursor = {"cursor": page["nextCursor"]}

    async def _begin(self, method: str, params: Data) -> Data:
        try:
            return await self._request(method, params, self._start_timeout)
        except RemoteError as error:
            raise InfrastructureError(f"{self.name} refuses {method}: {error}") from None
        except TookTooLong:
            late = f"{self.name} did not answer {method} within {self._start_timeout:g} s"
            raise InfrastructureError(late + self._why()) from None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def result_of(answer: Data) -> Data:
    """Of a response. RemoteError: it is an error."""
    if (error := answer.get("error")) is not None:
        raise RemoteError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    result = answer.get("result")
    return result if isinstance(result, dict) else {}


def reply_to(request: Data) -> Data:
    """What a server that asks something is told: pings are answered, and nothing else is offered."""
    answer: Data = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "ping":
        return {**answer, "result": {}}
    return {**answer, "error": {"code": -32601, "message": f"this client does not offer {request['method']}"}}
