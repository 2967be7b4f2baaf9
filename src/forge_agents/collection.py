"""Collections of environments that people have: their tasks as prompts, their scores as rewards."""

import asyncio
import hashlib
import itertools
import json
import logging
import math
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.config import ConfigError
from forge.recipes.components import POLICY
from forge.types import Sample
from forge_envs.environment import InfrastructureError

from .config import AgentConfig
from .environment import Outcome
from .settings import Access
from .workers.protocol import MAX_LINE

log = logging.getLogger(f"forge.{__name__}")

OPENING = 300.0  # seconds until an environment is open: imports take 30 of them on a cold disk
GRACE = 10.0  # seconds beyond a request's timeout until its answer, and until an ended worker has gone

Values = dict[str, Any]  # plain JSON


class Worker:
    """A process that answers requests as `forge_agents.workers.protocol` says.

    It is started by the first request, and again by the next one after it died; then it opens its environment.

    Args:
        command: the words that start it.
        opening: the fields of its request "open".
        env: variables in addition to this process's.
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
        """Return the result of a request.

        Args:
            op: "rows" or "play".
            timeout: seconds.
            fields: of the request.

        Raises:
            ConfigError: a setting is invalid, which no additional attempt would change.
            InfrastructureError: the request failed, the worker died, or there was no result in time.
        """
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                await self.close()
                self._process = await self._start_process()
                try:
                    await self._ask_process(self._process, "open", OPENING, self.opening)
                except BaseException:
                    await self.close()
                    raise
            process = self._process
        return await self._ask_process(process, op, timeout, fields)

    async def close(self) -> None:
        """End the process: it is asked to by the end of its input, and killed if it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self.grace)
        _kill_group(process)
        await asyncio.wait(self._reading)

    async def _start_process(self) -> Process:
        """Start the process. ConfigError: its program cannot be executed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=worker_variables(self.command[0]) | self.env,
                limit=MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"episode.agent.collection.python {self.command[0]} cannot be executed ({error.strerror}): name the "
                "python of the environment that has the collection (docs/agent_gateway.md)"
            ) from None

        self.starts += 1
        self._reading = [asyncio.create_task(read(process)) for read in (self._read_words, self._read_answers)]
        return process

    async def _ask_process(self, process: Process, op: str, timeout: float, fields: Mapping[str, Any]) -> Values:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        assert process.stdin is not None

        try:
            process.stdin.write(json.dumps({"id": number, "op": op, "timeout": timeout, **fields}).encode() + b"\n")
            message = await asyncio.wait_for(answer, timeout + self.grace)
        except TimeoutError:
            # It ends its requests in time itself, unless its loop hangs, which would hold all others.
            _kill_group(process)
            raise InfrastructureError(f"the worker hung: it gave no result of {op!r} within {timeout:g} s") from None
        finally:
            del self._answers[number]

        if "error" not in message:
            return dict(message["result"])
        if message["setting"]:
            raise ConfigError(f"episode.agent.collection: {message['error']}")
        raise InfrastructureError(str(message["error"]))

    async def _read_answers(self, process: Process) -> None:
        """Read the worker's results until it exits; requests without a result fail then."""
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


def _kill_group(process: Process) -> None:
    # Its group: processes that it left would go on asking for turns.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def worker_variables(python: str) -> dict[str, str]:
    """Return the variables of a worker: this process's, with the programs alongside its Python first.

    Args:
        python: the path of its interpreter, alongside which others, such as uv, were installed for it.
    """
    path = os.pathsep.join([os.path.dirname(os.path.abspath(python)), os.environ.get("PATH", os.defpath)])
    # The gateway is on loopback, where no proxy leads.
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {**os.environ, "PATH": path, "NO_PROXY": local, "no_proxy": local}


SCRIPT = Path(__file__).parent / "workers/verifiers_worker.py"
READING = 3600.0  # seconds until all rows are read, which may be downloaded first

Row = dict[str, Any]  # {"question": text, "answer": the task as plain JSON}


def worker_of(agent: AgentConfig) -> Worker:
    """Return a worker of an agent's collection."""
    assert agent.collection is not None
    opening = {"environment": agent.collection.environment, "args": agent.collection.args}
    return Worker([agent.collection.python, str(SCRIPT)], opening, env=agent.env)


class WorkerPlay:
    """How a worker plays tasks."""

    def __init__(self, agent: AgentConfig) -> None:
        assert agent.collection is not None
        self.timeout = agent.timeout + agent.collection.scoring_timeout
        self.worker = worker_of(agent)

    async def close(self) -> None:
        """End the worker."""
        await self.worker.close()

    async def __call__(self, access: Access, sample: Sample, evaluation: bool = False) -> Outcome:
        """Play one episode; it is lost if the environment or its worker fails. ConfigError: a setting is invalid."""
        url = f"{access.url}/s/{access.key}"
        try:
            result = await self.worker.request("play", self.timeout, task=task_of(sample), url=url, model=POLICY)
            reward = result.get("reward")
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise InfrastructureError(f"the environment's reward is {reward!r}, not a finite number")
        except InfrastructureError as error:
            # Returned, not raised: so the tokens of this attempt are in the account of the next one.
            log.warning("an episode of %s was lost: %s", sample.prompt.text[:60] or "a task", error)
            return Outcome(None, "infrastructure", True, {"error": str(error)})
        return Outcome(float(reward), str(result.get("stop", "ended")), info={"metrics": result.get("metrics", {})})


def task_of(sample: Sample) -> Any:
    """Return the task of a sample. ConfigError: its row is not one of a collection."""
    try:
        return json.loads(sample.target)
    except ValueError:
        raise ConfigError(
            f"dataset: {sample.target!r:.60} is not a task of a collection: write its rows by `forge agents rows`, and "
            "leave dataset.target_field as it is"
        ) from None


def check_collection(agent: AgentConfig) -> None:
    """ConfigError: the collection's package or environment is not there, or a setting of it is invalid."""
    # In a thread: the caller may have a running loop.
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(lambda: asyncio.run(read_rows(agent, 0))).result()
        except InfrastructureError as error:
            raise ConfigError(f"episode.agent.collection: {error}") from None


async def read_rows(agent: AgentConfig, limit: int = -1) -> dict[str, list[Row]]:
    """Return the rows of a collection by their split, "train" and "eval". InfrastructureError: it failed.

    Args:
        limit: the most that are read; -1: all.
    """
    splits: dict[str, list[Row]] = {"train": [], "eval": []}
    worker = worker_of(agent)
    try:
        for split, row in (await worker.request("rows", READING, limit=limit))["rows"]:
            splits[split].append(row)
    finally:
        await worker.close()
    return splits


def hold_out(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Return rows for training and held-out ones, decided by the question itself, so that equal questions stay
    together.

    Args:
        share: of the held-out ones, 0 to 1.
    """
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        digest = hashlib.blake2b(row["question"].encode("utf-8", "surrogatepass"), digest_size=8).digest()
        parts[int.from_bytes(digest, "big") < share * 2**64].append(row)
    return parts
