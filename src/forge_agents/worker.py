"""A worker: a process of another Python that plays episodes, any number at once, and is started again when it dies."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from forge.config import ConfigError
from forge_envs.environment import InfrastructureError

from .workers.protocol import MAX_LINE

log = logging.getLogger(f"forge.{__name__}")

OPENING = 300.0  # seconds until an environment is open: imports alone take 30 on a cold disk
GRACE = 10.0  # seconds beyond a request's timeout until its answer, and until an ended worker has gone

Values = dict[str, Any]  # plain JSON


class Worker:
    """A process that answers requests as `forge_agents.workers.protocol` says.

    It is started by the first request, and again by the next one after it died; then it opens its environment.

    Args:
        command: the words that start it.
        opening: the fields of its request "open".
        env: variables beside those of this process.
        grace: seconds beyond a request's timeout after which it is taken to hang, and killed.
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
        self._process: Process | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._answers: dict[int, asyncio.Future[Values]] = {}
        self._numbers = itertools.count(1)
        self._last_word = "no word"
        self._lock = asyncio.Lock()

    async def request(self, op: str, timeout: float, **fields: Any) -> Values:
        """The result of a request.

        Args:
            op: "rows" or "play".
            timeout: seconds.
            fields: those of the request.

        Raises:
            ConfigError: a setting is invalid, which no further attempt would change.
            InfrastructureError: the request failed, the worker died, or there was no result in time.
        """
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                await self.close()
                self._process = await self._start()
                try:
                    await self._ask(self._process, "open", OPENING, self.opening)
                except BaseException:
                    await self.close()
                    raise
            process = self._process
        return await self._ask(process, op, timeout, fields)

    async def close(self) -> None:
        """End the process: it is asked to by the end of its input, and killed if it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self.grace)
        _kill(process)
        await asyncio.wait(self._reading)

    async def _start(self) -> Process:
        """Start the process. ConfigError: its program cannot be executed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=variables(self.command[0]) | self.env,
                limit=MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"episode.agent.collection.python {self.command[0]} cannot be executed ({error.strerror}): name the "
                "python of the environment that has the collection (docs/collections.md)"
            ) from None
        self.starts += 1
        self._reading = [asyncio.create_task(read(process)) for read in (self._read_words, self._read_answers)]
        return process

    async def _ask(self, process: Process, op: str, timeout: float, fields: Mapping[str, Any]) -> Values:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"id": number, "op": op, "timeout": timeout, **fields}).encode() + b"\n")
            message = await asyncio.wait_for(answer, timeout + self.grace)
        except TimeoutError:
            # It ends its requests in time itself, unless its loop hangs, which would hold all others.
            _kill(process)
            raise InfrastructureError(f"the worker hung: it gave no result of {op!r} within {timeout:g} s") from None
        finally:
            del self._answers[number]
        if "error" not in message:
            return dict(message["result"])
        if message["setting"]:
            raise ConfigError(f"episode.agent.collection: {message['error']}")
        raise InfrastructureError(str(message["error"]))

    async def _read_answers(self, process: Process) -> None:
        """Take the worker's messages until it ends; what is unanswered then fails."""
        assert process.stdout is not None
        async for line in process.stdout:
            message = json.loads(line)
            answer = self._answers.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        code = await process.wait()
        await asyncio.wait(self._reading[:1], timeout=1.0)
        problem = f"the worker ended with exit code {code}: {self._last_word[-500:]}"
        log.warning(problem)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(InfrastructureError(problem))

    async def _read_words(self, process: Process) -> None:
        """Keep the last line of its standard error."""
        assert process.stderr is not None
        async for line in process.stderr:
            text = line.decode(errors="replace").strip()
            log.debug("worker: %s", text)
            self._last_word = text or self._last_word


def _kill(process: Process) -> None:
    # Its group: processes that it left would go on asking for turns.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def variables(python: str) -> dict[str, str]:
    """The variables of a worker: those of this process, with the programs beside its Python first.

    Args:
        python: the path of its interpreter, beside which others, such as uv, were installed for it.
    """
    path = os.pathsep.join([os.path.dirname(os.path.abspath(python)), os.environ.get("PATH", os.defpath)])
    # The gateway is on loopback, where no proxy leads.
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {**os.environ, "PATH": path, "NO_PROXY": local, "no_proxy": local}
