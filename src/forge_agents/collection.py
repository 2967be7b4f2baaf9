"""Environments of published collections: their tasks are the prompts, and their scores the rewards.

A collection runs in a process with its own Python environment, the worker, since its packages may conflict with ours.
"""

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

OPENING = 300.0  # seconds until an environment must be open: its imports may take 30 s from a cold disk
GRACE = 10.0  # seconds for an answer after its request's timeout, and for a worker to exit

Values = dict[str, Any]  # plain JSON


class Worker:
    """A process that answers requests in the format of `forge_agents.workers.protocol`.

    The first request starts the process and opens its environment. If the process dies, the next request does so again.

    Args:
        command: the program and its arguments.
        opening: the fields of the request "open".
        env: environment variables in addition to this process's.
        grace: how many seconds after a request's timeout a process that has not answered is killed, as it must hang.
    """

    def __init__(
        self,
        command: Sequence[str],
        opening: Mapping[str, Any],
        *,
        env: Mapping[str, str] | None = None,
        grace: float = GRACE,
    ) -> None:
        self.command, self.opening, self.grace = list(command), dict(opening), grace
        # The interpreter's folder is first in PATH: programs that the collection needs, such as uv, may be there.
        path = os.pathsep.join([os.path.dirname(os.path.abspath(command[0])), os.environ.get("PATH", os.defpath)])
        # Requests to the gateway, which is on loopback, must not be sent to a proxy.
        local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
        self.env = {**os.environ, "PATH": path, "NO_PROXY": local, "no_proxy": local, **(env or {})}
        self.starts = 0
        self._process: Any = None  # asyncio's Process, with pipes
        self._readers: list[asyncio.Task[None]] = []  # of standard error, and of standard output
        self._answers: dict[int, asyncio.Future[Values]] = {}  # by the numbers of the requests
        self._numbers = itertools.count(1)
        self._last_error_line = "no word"
        self._lock = asyncio.Lock()  # held while the process is started

    async def request(self, op: str, timeout: float, **fields: Any) -> Values:
        """Send a request to the process, which is started if it does not run, and return its result.

        Args:
            op: "rows" or "play".
            timeout: seconds.
            fields: the request's other fields.

        Raises:
            ConfigError: a setting is invalid, so that a retry would fail too.
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
        """Close the process's standard input, after which it exits, and kill it if it has not exited after `grace`."""
        process, self._process = self._process, None
        if process is None:
            return
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self.grace)
        _kill_group(process)
        await asyncio.wait(self._readers)

    async def _start_process(self) -> Any:
        """Start and return the process; ConfigError if its program cannot be executed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=self.env,
                limit=MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"episode.agent.collection.python {self.command[0]} cannot be executed ({error.strerror}): name the "
                "python of the environment that has the collection (docs/agent_gateway.md)"
            ) from None

        self.starts += 1
        self._readers = [asyncio.create_task(read(process)) for read in (self._read_errors, self._read_answers)]
        return process

    async def _ask_process(self, process: Any, op: str, timeout: float, fields: Mapping[str, Any]) -> Values:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write(json.dumps({"id": number, "op": op, "timeout": timeout, **fields}).encode() + b"\n")
            message = await asyncio.wait_for(answer, timeout + self.grace)
        except TimeoutError:
            # The worker itself ends requests at their timeout. If it has not, its event loop hangs, and with it all
            # other requests.
            _kill_group(process)
            raise InfrastructureError(f"the agent worker did not respond to {op!r} within {timeout:g} s") from None
        finally:
            del self._answers[number]

        if "error" not in message:
            return dict(message["result"])
        if message["setting"]:
            raise ConfigError(f"episode.agent.collection: {message['error']}")
        raise InfrastructureError(str(message["error"]))

    async def _read_answers(self, process: Any) -> None:
        """Read the process's answers until it exits, then fail the requests without an answer."""
        async for line in process.stdout:
            message = json.loads(line)
            answer = self._answers.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        code = await process.wait()
        # The reader of standard error, the first one, may not have read the last line yet.
        await asyncio.wait(self._readers[:1], timeout=1.0)
        problem = f"the worker ended with exit code {code}: {self._last_error_line[-500:]}"
        log.warning(problem)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(InfrastructureError(problem))

    async def _read_errors(self, process: Any) -> None:
        """Log the lines of standard error, and keep the last one that is not empty."""
        async for line in process.stderr:
            text = line.decode(errors="replace").strip()
            log.debug("worker: %s", text)
            self._last_error_line = text or self._last_error_line


def _kill_group(process: Process) -> None:
    # The whole process group: otherwise programs that the worker has started would continue to ask for turns.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


SCRIPT = Path(__file__).parent / "workers/verifiers_worker.py"
READING = 3600.0  # seconds until all rows must be read; they may have to be downloaded

Row = dict[str, Any]  # {"question": text, "answer": the task as plain JSON}


def worker_of(agent: AgentConfig) -> Worker:
    """Return a worker for an agent's collection, without starting it."""
    assert agent.collection is not None
    return Worker(
        [agent.collection.python, str(SCRIPT)],
        {"environment": agent.collection.environment, "args": agent.collection.args},
        env=agent.env,
    )


class WorkerPlay:
    """Callable that plays and scores tasks of an agent collection in a worker process."""

    def __init__(self, agent: AgentConfig) -> None:
        assert agent.collection is not None
        self.timeout = agent.timeout + agent.collection.scoring_timeout
        self.worker = worker_of(agent)
        self.close = self.worker.close

    async def __call__(self, access: Access, sample: Sample, evaluation: bool = False) -> Outcome:
        """Play one episode, and return its reward; it is lost if the environment or its worker fails.

        Args:
            access: how the environment's harness reaches its session of the gateway.
            sample: a row that `forge agents rows` has written.

        Raises:
            ConfigError: a setting is invalid, or the sample is not a task of a collection.
        """
        url = f"{access.url}/s/{access.key}"
        try:
            task = json.loads(sample.target)
        except ValueError:
            raise ConfigError(
                f"dataset: {sample.target!r:.60} is not a task of the agent collection: write the rows with `forge "
                "agents rows`, and keep the default dataset.target_field"
            ) from None
        try:
            result = await self.worker.request("play", self.timeout, task=task, url=url, model=POLICY)
            reward = result.get("reward")
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise InfrastructureError(f"the environment's reward must be a finite number, got {reward!r}")
        except InfrastructureError as error:
            # Returned, not raised: the environment then counts the tokens of this attempt in the episode's certificate.
            log.warning("an episode of %s was lost: %s", sample.prompt.text[:60] or "a task", error)
            return Outcome(None, "infrastructure", True, {"error": str(error)})
        return Outcome(float(reward), str(result.get("stop", "ended")), info={"metrics": result.get("metrics", {})})


def check_collection(agent: AgentConfig) -> None:
    """Check that an agent's collection can be opened, by starting its worker once. ConfigError: it cannot be."""
    # In a thread: `asyncio.run` raises an error if the caller runs in an event loop.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(read_rows(agent, 0))).result()


async def read_rows(agent: AgentConfig, limit: int = -1) -> dict[str, list[Row]]:
    """Return the rows of an agent's collection, in two lists under "train" and "eval".

    Args:
        limit: the most rows to read; -1: all.

    Raises:
        ConfigError: the package or the environment is not installed, a setting is invalid, or reading failed.
    """
    splits: dict[str, list[Row]] = {"train": [], "eval": []}
    worker = worker_of(agent)
    try:
        for split, row in (await worker.request("rows", READING, limit=limit))["rows"]:
            splits[split].append(row)
    except InfrastructureError as error:
        raise ConfigError(f"episode.agent.collection: {error}") from None
    finally:
        await worker.close()
    return splits


def hold_out(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Split rows into those for training and those that are held out.

    A digest of the question decides, so that rows with equal questions are in the same part, in every run.

    Args:
        share: the expected share of held-out rows, 0 to 1.
    """
    training: list[Row] = []
    held_out: list[Row] = []
    for row in rows:
        digest = hashlib.blake2b(row["question"].encode("utf-8", "surrogatepass"), digest_size=8).digest()
        is_held_out = int.from_bytes(digest, "big") < share * 2**64  # an 8-byte digest is below 2**64
        (held_out if is_held_out else training).append(row)
    return training, held_out
