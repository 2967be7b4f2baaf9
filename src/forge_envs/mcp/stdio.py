"""An MCP server that is a program: a line of JSON for each message, on its standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from forge.envs.environment import InfrastructureError

from ..process import Program, words
from .client import Data, MCPTools, RemoteError, TookTooLong, ToolError, reply_to, result_of

LONGEST = 64 << 20  # bytes of one line
_PING = 5.0  # seconds in which a server that is well answers a ping


class StdioTools(MCPTools):
    """The tools of a program, which runs from `open` to `close` and ends with this process.

    After a call that nobody waited for to its end the program is asked whether it still answers. If it does not, it is
    started anew, and the call that found out is a `ToolError` that says so.

    Args:
        command: its words.
        cwd: where it runs.
        env: variables in addition to those of this process.
        timeout: seconds for one call.
        start_timeout: seconds for each step of the beginning.

    Raises:
        ValueError: a limit that cannot be, or a command that is one text.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        start_timeout: float = 30.0,
    ) -> None:
        super().__init__(" ".join(words(command)), timeout, start_timeout)
        self._command, self._cwd, self._env = words(command), cwd, dict(env or {})
        self._program: Program | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Data]] = {}
        self._late, self._checking = False, asyncio.Lock()

    @property
    def connected(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def close(self) -> None:
        """End the program: its input is closed, after 5 s it is killed."""
        program, self._program = self._program, None
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
        self._lose(f"{self.name} was closed")
        self._lost, self._late = "", False
        if program is not None:
            await program.stop()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `MCPTools.call`."""
        async with self._checking:
            if self._late and self.connected:
                await self._revive()
        return await super().call(name, arguments)

    async def _revive(self) -> None:
        self._late = False
        try:
            with suppress(RemoteError):  # it knows no pings, but answers
                await self._request("ping", {}, _PING)
        except TookTooLong:
            await self.close()
            await self.open()
            raise ToolError(
                f"{self.name} hung in an earlier call and was started anew: what it had kept is lost, call again"
            ) from None

    async def _connect(self) -> None:
        self._program = await Program.start(self._command, pipes=True, line_limit=LONGEST, cwd=self._cwd, env=self._env)
        self._reader = asyncio.create_task(self._read(self._program))

    async def _request(self, method: str, params: Data, limit: float) -> Data:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit) as deadline:
                await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
                return result_of(await answer)
        except TimeoutError:
            if not deadline.expired():
                raise
            self._give_up(number)
            raise TookTooLong from None
        except asyncio.CancelledError:
            self._give_up(number)
            raise
        finally:
            self._waiting.pop(number, None)

    async def _notify(self, method: str, params: Data) -> None:
        await self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def _give_up(self, number: int) -> None:
        """Nobody waits for this answer any more; should it come, its number tells that it is not another's."""
        self._late = True
        if self._program is not None and self._program.stdin is not None and not self._program.stdin.is_closing():
            told = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}}
            self._program.stdin.write(json.dumps(told).encode() + b"\n")

    async def _send(self, message: Data) -> None:
        if self._program is None or self._program.stdin is None:
            raise InfrastructureError(f"{self.name} was closed")
        try:
            self._program.stdin.write(json.dumps(message).encode() + b"\n")
            await self._program.stdin.drain()
        except ConnectionError:
            await self._program.wait(1.0)
            raise InfrastructureError(f"{self.name} reads no more{self._why()}") from None

    async def _read(self, program: Program) -> None:
        """Hand each answer to whoever asked, until there are no more."""
        assert program.stdout is not None and program.stdin is not None
        why = ""
        try:
            while line := await program.stdout.readline():
                try:
                    message = json.loads(line)
                except (ValueError, RecursionError):
                    continue  # a server that prints: nothing that somebody waits for
                if not isinstance(message, dict):
                    continue
                number = message.get("id")
                waiting = self._waiting.get(number) if isinstance(number, int) else None
                if "method" in message:
                    if "id" in message:
                        program.stdin.write(json.dumps(reply_to(message)).encode() + b"\n")
                elif waiting is not None and not waiting.done():
                    waiting.set_result(message)
        except ValueError:
            why = f": it wrote a line of more than {LONGEST >> 20} MB"
        await program.wait(1.0)
        self._lose(f"{self.name} has gone{why}{self._why()}")

    def _lose(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(InfrastructureError(why))
        self._lost = "" if waiting else why

    def _why(self) -> str:
        return f"; {self._program.ended()}" if self._program is not None else ""
