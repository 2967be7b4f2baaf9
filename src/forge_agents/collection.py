"""Collections of environments that people have: their tasks as prompts, their scores as rewards."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forge.config import ConfigError
from forge.recipes.components import POLICY
from forge.types import Sample
from forge_envs.environment import InfrastructureError

from .config import AgentConfig
from .environment import Outcome
from .settings import Access
from .worker import Worker

log = logging.getLogger(f"forge.{__name__}")

SCRIPT = Path(__file__).parent / "workers/verifiers_worker.py"
READING = 3600.0  # seconds until all rows are read, which may be downloaded first

Row = dict[str, Any]  # {"question": text, "answer": the task as plain JSON}


def worker_of(agent: AgentConfig) -> Worker:
    """A worker of an agent's collection."""
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
    # In a thread: the caller may have a running loop.
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(lambda: asyncio.run(read_rows(agent, 0))).result()
        except InfrastructureError as error:
            raise ConfigError(f"episode.agent.collection: {error}") from None


async def read_rows(agent: AgentConfig, limit: int = -1) -> dict[str, list[Row]]:
    """The rows of a collection by their split, "train" and "eval". InfrastructureError: it failed.

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
    """Rows for training and held-out ones, decided by the question itself, so that equal questions stay together.

    Args:
        share: of the held-out ones, 0 to 1.
    """
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        digest = hashlib.blake2b(row["question"].encode("utf-8", "surrogatepass"), digest_size=8).digest()
        parts[int.from_bytes(digest, "big") < share * 2**64].append(row)
    return parts
