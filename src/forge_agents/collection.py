"""Collections of environments that people have: their tasks as prompts, their scores as rewards."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat

from forge.config import ConfigError
from forge.config.sections import Section
from forge.envs.environment import InfrastructureError
from forge.types import Sample

from . import workers
from .environment import POLICY, Outcome
from .settings import Access
from .worker import Worker

if TYPE_CHECKING:
    from .config import AgentConfig

log = logging.getLogger(__name__)

WORKERS = {"verifiers": "verifiers_worker.py", "nemo": "nemo_worker.py"}  # in the folder of `forge_agents.workers`
READING = 3600.0  # seconds until all rows are read, which may be downloaded first

Row = dict[str, Any]  # {"question": text, "answer": the task as plain JSON}


class CollectionConfig(Section):
    """An environment of a collection, which plays and scores the episodes."""

    kind: Literal["verifiers", "nemo", "harbor"]
    """`verifiers` 0.4 or `nemo-gym` 0.4, each in a Python environment of its package, or task folders of Harbor."""
    environment: str
    """The id of a taskset of verifiers; a resources server of NeMo Gym or a YAML file of one; a folder of tasks."""
    python: str | None = None
    """The Python that has the package: `ENVIRONMENT/bin/python`. Not of `harbor`, which needs none."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment, in the package's words."""
    scoring_timeout: PositiveFloat = 120.0
    """Seconds that an episode may take beyond `episode.agent.timeout`, for its scores."""

    def _check(self) -> None:
        if self.kind in WORKERS:
            if self.python is None:
                raise ConfigError(f"episode.agent.collection.python must name the Python that has {self.kind}")
            # A name is looked up as a shell does; a path must be one of a program.
            if shutil.which(self.python) is None:
                raise ConfigError(
                    f"episode.agent.collection.python {self.python} is not a program: make the environment "
                    "(docs/collections.md), and name its bin/python"
                )
        elif self.python is not None:
            raise ConfigError(f"episode.agent.collection.python does nothing: {self.kind} needs no other Python")

    def worker(self, env: Mapping[str, str]) -> Worker:
        """A worker of this environment.

        Args:
            env: variables of its process, beside those of this one.
        """
        assert self.python is not None
        script = Path(workers.__file__).parent / WORKERS[self.kind]
        return Worker([self.python, str(script)], {"environment": self.environment, "args": self.args}, env=env)


class WorkerPlay:
    """How a worker plays tasks."""

    def __init__(self, agent: AgentConfig) -> None:
        assert agent.collection is not None
        self.timeout = agent.timeout + agent.collection.scoring_timeout
        self.worker = agent.collection.worker(agent.env)
        self.holder = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        """Hold the worker until the run's event loop ends."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.worker.close()

    async def __call__(self, access: Access, sample: Sample) -> Outcome:
        """Play one episode; it is lost if the environment or its worker fails. ConfigError: a setting is invalid."""
        url = f"{access.url}/s/{access.key}"
        try:
            result = await self.worker.request("play", self.timeout, task=task_of(sample), url=url, model=POLICY)
            reward = result.get("reward")
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise InfrastructureError(f"the environment's reward is {reward!r}, not a finite number")
        except InfrastructureError as error:
            # An outcome, by which the tokens of the attempt are in the account of the next one.
            log.warning("an episode of %s was lost: %s", sample.prompt.text[:60] or "a task", error)
            return Outcome(None, "infrastructure", True, {"error": str(error)})
        return Outcome(float(reward), str(result.get("stop", "ended")), info={"metrics": result.get("metrics", {})})


def task_of(sample: Sample) -> Any:
    """The task of a sample. ConfigError: its row is not one of a collection."""
    try:
        return json.loads(sample.target)
    except ValueError:
        raise ConfigError(
            f"dataset: {sample.target!r:.60} is not a task of a collection: write its rows by `forge agents rows`, and "
            "leave dataset.target_field as it is"
        ) from None


def check_collection(agent: AgentConfig) -> None:
    """ConfigError: the collection's package or environment is not there, or a setting of it is invalid."""
    assert agent.collection is not None
    if agent.collection.kind == "harbor":
        from .harbor_task import read_tasks

        read_tasks(agent.collection)
        return

    async def check(worker: Worker) -> None:
        try:
            await worker.request("rows", READING, limit=0)
        except InfrastructureError as error:
            raise ConfigError(f"episode.agent.collection: {error}") from None
        finally:
            await worker.close()

    # In a thread: the caller may have a running loop.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(check(agent.collection.worker(agent.env)))).result()  # type: ignore[union-attr]


async def read_rows(agent: AgentConfig, limit: int = -1) -> dict[str, list[Row]]:
    """The rows of a collection by their split, "train" and "eval". InfrastructureError: it failed.

    Args:
        limit: the most that are read; -1: all.
    """
    assert agent.collection is not None
    splits: dict[str, list[Row]] = {"train": [], "eval": []}
    if agent.collection.kind == "harbor":
        from .harbor_task import read_tasks

        tasks = read_tasks(agent.collection)
        splits["train"] = [{"question": task.instruction, "answer": {"task": name}} for name, task in tasks.items()]
        splits["train"] = splits["train"][: None if limit < 0 else limit]
        return splits
    worker = agent.collection.worker(agent.env)
    try:
        await worker.request("rows", READING, limit=limit, on_row=lambda split, row: splits[split].append(row))
    finally:
        await worker.close()
    return splits


def hold_out(rows: Iterable[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Rows for training and held-out ones, decided by the question itself, so that equal questions stay together.

    Args:
        share: of the held-out ones, 0 to 1; with more than 0 at least one question is held out.
    """
    places = {row["question"]: _place(row["question"]) for row in rows}
    # The first question, where chance holds none out.
    bound = max(share, min(places.values(), default=0.0) + 1e-12) if share > 0 else 0.0
    held_out = [row for row in rows if places[row["question"]] < bound]
    return [row for row in rows if places[row["question"]] >= bound], held_out


def _place(question: str) -> float:
    """A number from 0 to 1 that depends on the question alone."""
    digest = hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64
