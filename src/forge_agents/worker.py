"""A worker: a process of another Python that plays episodes, any number at once, and is started again when it dies."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from forge.config import ConfigError
from forge_envs.environment import InfrastructureError

from .workers.protocol import MAX_LINE

log = logging.getLogger(f"forge.{__name__}")

OPENING = 300.0  # seconds until an environment is open: imports alone take 30 on a cold disk
GRACE = 10.0  # seconds until a worker acknowledges a cancelled request, and until it has ended
WORDS = 30  # lines of a worker's standard error that an error may quote

Values = dict[str, Any]  # plain JSON
Rows = Callable[[str, Values], None]  # gets a row with its split


class Worker:
    """A process that answers requests as `forge_agents.workers.protocol` says.

    It is started by the first request, and again by the next one after it died; then it opens its environment.

    Args:
        command: the words that start it.
        opening: the fields of its request "open".
        env: variables beside those of this process.
        grace: seconds until it acknowledges that a request is cancelled; beyond them it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        opening: Mapping[str, Any],
        *,
        env: Mapping[str, str] | None = None,
        grace: float = GRACE,
    ) -> None:
        self.command, self.opening, self.env, self.grace = list(command), dict(opening), dict(env or {}), grace
        self.starts = 0
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()

    async def request(self, op: str, timeout: float, *, on_row: Rows | None = None, **fields: Any) -> Values:
        """The result of a request.

        Args:
            op: "rows" or "play".
            timeout: seconds.
            on_row: gets the rows of "rows".
            fields: those of the request.

        Raises:
            ConfigError: a setting is invalid, which no further attempt would change.
            InfrastructureError: the request failed, the worker died, or there was no result in time.
        """
        connection = await self._connected()
        return await connection.request(op, timeout, on_row, fields)

    async def _connected(self) -> _Connection:
        async with self._lock:
            if self._connection is None or self._connection.problem is not None:
                if self._connection is not None:
                    log.warning("a worker is started again: %s", self._connection.problem)
                    await self._connection.close()
                self._connection = await _Connection.start(self.command, self.env, self.grace)
                self.starts += 1
                try:
                    await self._connection.request("open", OPENING, None, self.opening)
                except BaseException:
                    await self._connection.close()
                    self._connection = None
                    raise
            return self._connection

    async def close(self) -> None:
        """End the process, and all requests."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


class _Connection:
    """One process, until it ends. `problem` says in a line why it takes no further requests."""

    def __init__(self, process: Process, grace: float) -> None:
        self.process, self.grace = process, grace
        self.problem: str | None = None
        self.words: deque[str] = deque(maxlen=WORDS)
        self.answers: dict[int, asyncio.Future[Values]] = {}
        self.rows: dict[int, Rows] = {}
        self.numbers = itertools.count(1)
        self.tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._read_words())]

    @classmethod
    async def start(cls, command: Sequence[str], env: dict[str, str], grace: float) -> _Connection:
        """Start the process. ConfigError: its program cannot be executed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=variables(command[0]) | env,
                limit=MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"episode.agent.collection.python {command[0]} cannot be executed ({error.strerror}): name the python "
                "of the environment that has the collection (docs/collections.md)"
            ) from None
        return cls(process, grace)

    async def request(self, op: str, timeout: float, on_row: Rows | None, fields: Mapping[str, Any]) -> Values:
        number = next(self.numbers)
        answer: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        if on_row is not None:
            self.rows[number] = on_row
        try:
            await self._send({"id": number, "op": op, **fields})
            message = await asyncio.wait_for(asyncio.shield(answer), timeout)
        except TimeoutError:
            await self._cancel(number, answer)
            raise InfrastructureError(f"the worker gave no result of {op!r} within {timeout:g} s") from None
        except asyncio.CancelledError:
            with suppress(InfrastructureError):
                await self._send({"id": number, "op": "cancel"})
            raise
        finally:
            self.answers.pop(number, None)
            self.rows.pop(number, None)
        if "error" not in message:
            result: Values = message["result"]
            return result
        if message["setting"]:
            raise ConfigError(f"episode.agent.collection: {message['error']}")
        raise InfrastructureError(str(message["error"]))

    async def _send(self, message: Values) -> None:
        if self.problem is not None:
            raise InfrastructureError(self.problem)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        with suppress(ConnectionError):  # `_listen` sees that it ended, and why
            await self.process.stdin.drain()

    async def _cancel(self, number: int, answer: asyncio.Future[Values]) -> None:
        """End a request. A worker whose loop hangs would hold all others, so it is killed."""
        try:
            await self._send({"id": number, "op": "cancel"})
            await asyncio.wait_for(answer, self.grace)
        except TimeoutError:
            self._fail(f"the worker hung: it did not acknowledge a cancelled request within {self.grace:g} s")
        except InfrastructureError:
            log.debug("a worker died while a request of it was cancelled")

    async def _listen(self) -> None:
        """Take the worker's messages until it ends."""
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A line of another form, or longer than any message: what follows cannot be trusted.
            self._fail(f"the worker wrote a line that is not a message: {error}")
            return
        code = await self.process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.tasks[1]), 1.0)
        last = next((line for line in reversed(self.words) if line.strip()), "no word")
        self._fail(f"the worker ended with exit code {code}: {last.strip()[-500:]}")

    def _take(self, line: bytes) -> None:
        message = json.loads(line)
        number = message["id"]
        if "row" in message:
            if number in self.rows:
                self.rows[number](message["split"], message["row"])
        elif number in self.answers and not self.answers[number].done():
            # An answer has a result, or an error with its kind.
            if not isinstance(message.get("result"), dict) and "setting" not in message:
                raise ValueError(f"{line[:200]!r} has neither a result nor an error")
            self.answers[number].set_result(message)

    async def _read_words(self) -> None:
        """Keep the last lines of its standard error."""
        assert self.process.stderr is not None
        while part := await self.process.stderr.read(1 << 16):
            for line in part.decode(errors="replace").splitlines():
                log.debug("worker: %s", line)
                self.words.append(line)

    def _fail(self, problem: str) -> None:
        """End the process; all its requests fail with this problem."""
        if self.problem is not None:
            return
        self.problem = problem
        # Its group: processes that it left would go on asking for turns.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(InfrastructureError(self.problem))
                answer.exception()  # its caller may be gone

    async def close(self) -> None:
        """End the process: it is asked to by the end of its input, and killed if it takes too long."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), self.grace)
        self._fail("the worker was closed")
        await self.process.wait()
        await asyncio.wait(self.tasks)


def variables(python: str) -> dict[str, str]:
    """The variables of a worker: those of this process, with the programs beside its Python first.

    Args:
        python: the path of its interpreter, beside which others, such as uv, were installed for it.
    """
    path = os.pathsep.join([os.path.dirname(os.path.abspath(python)), os.environ.get("PATH", os.defpath)])
    # The gateway is on loopback, where no proxy leads.
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {**os.environ, "PATH": path, "NO_PROXY": local, "no_proxy": local}
