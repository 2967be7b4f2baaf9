"""Task folders of Harbor, without a container: a command plays them in the sandbox, their test.sh gives the reward."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.config import ConfigError
from forge.config.sections import build
from forge.recipes.components import POLICY
from forge.system.scratch import Scratch
from forge.types import Sample

from .agent import AgentCommand
from .collection import task_of
from .command import CommandRunner
from .config import AgentConfig
from .environment import Outcome
from .harbor_task import HarborArgs, HarborTask, read_tasks, reward_of
from .settings import Access


class HarborPlay:
    """How the configured command plays task folders.

    Args:
        runner: runs the agent and the tests; it is started.

    Raises:
        ConfigError: a task is invalid, or programs are not confined.
    """

    def __init__(self, agent: AgentConfig, runner: CommandRunner) -> None:
        assert agent.collection is not None
        if runner.level != "namespaces":
            raise ConfigError(
                "task folders of harbor need confined programs: their /tests and /logs would be those of this machine"
            )
        self.runner = runner
        self.args = build(HarborArgs, agent.collection.args, "episode.agent.collection.args")
        self.tasks = read_tasks(agent.collection)
        self.scratch = Scratch("forge-agents-")  # has what each task's folder begins with
        self.commands: dict[str, tuple[AgentCommand, AgentCommand]] = {}
        for number, (name, task) in enumerate(self.tasks.items()):
            folder = self.scratch.path / str(number)
            folder.mkdir()
            task.stage(folder)
            self.commands[name] = commands_of(agent, task, folder)

    async def __call__(self, access: Access, sample: Sample, evaluation: bool = False) -> Outcome:
        """Play one episode. ConfigError: there is no such task, or no such program."""
        name = str(task_of(sample).get("task"))
        if name not in self.tasks:
            raise ConfigError(f"dataset: task {name!r} is not in episode.agent.collection.environment")
        command, test = self.commands[name]
        task = self.tasks[name]
        result = await self.runner.run(
            command, url=access.url, key=access.key, model=POLICY, task_text=task.instruction
        )
        try:
            info: dict[str, Any] = {"exit_code": result.exit_code, "stdout": result.stdout[-500:]}
            info |= {"stderr": result.stderr[-500:], "reason": result.reason}
            if result.status == "missing":
                raise ConfigError(f"episode.agent.command: {result.reason}")
            if result.status == "failed":
                return Outcome(None, "infrastructure", True, info)
            await asyncio.to_thread(task.put_tests, result.folder, owned=os.geteuid() == 0)
            verdict = await self.runner.run(test, folder=result.folder)
            info |= {"test": (verdict.stdout + verdict.stderr)[-500:]}
            if verdict.status != "exited":
                info |= {"reason": f"tests: {verdict.reason}"}
                return Outcome(None, "infrastructure", verdict.status == "failed", info)
            try:
                reward = reward_of(verdict, self.args.reward)
            except ValueError as error:
                # The tests of a task fail again: another attempt would change nothing.
                return Outcome(None, "infrastructure", info=info | {"reason": str(error)})
            stop = "crashed" if result.status == "exited" and result.exit_code else result.status
            return Outcome(reward, stop, info=info)
        finally:
            result.remove()


def commands_of(agent: AgentConfig, task: HarborTask, folder: Path) -> tuple[AgentCommand, AgentCommand]:
    """The commands of the agent and of the tests. ConfigError: the task hides what the agent may read.

    Args:
        folder: what the task's folder begins with.
    """
    try:
        links = task.links(tuple(os.path.abspath(path) for path in agent.readable))
    except ValueError as error:
        raise ConfigError(f"task folder {task.folder}: {error}") from None
    command = replace(
        agent.agent_command(),
        files=folder,
        links=links,
        env={**task.env, **agent.env},
        timeout=min(agent.timeout, task.timeout or agent.timeout),
        memory_mb=task.memory_mb or agent.memory_mb,
    )
    words = ["/bin/sh", "-c", "/tests/test.sh"]
    test = replace(command, command=words, env={**task.env, **task.test_env}, timeout=task.test_timeout)
    return command, test
