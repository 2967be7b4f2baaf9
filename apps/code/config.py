"""Configuration of a run on programming tasks."""

from __future__ import annotations

import asyncio
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from apps.grpo.agents import AgentConfig
from forge.config import ConfigError, Section
from forge.envs.sandbox import SandboxError
from forge.envs.sandbox.config import SandboxConfig


class TestsConfig(Section):
    """How programs are tested."""

    credit: Literal["all", "share"] = "share"
    """For all tests, or the share that passes."""
    time_limit: PositiveFloat = 2.0
    """Seconds of a program with its tests."""
    attempts: PositiveInt = 1
    """At a task, at most `episode.max_turns`."""


class CodeConfig(AgentConfig):
    """Programming tasks, in a sandbox."""

    sandbox: SandboxConfig = SandboxConfig()
    tests: TestsConfig = TestsConfig()

    def check_reward(self) -> None:
        """ValueError: programs cannot be held back here."""

        async def probe() -> None:
            async with self.sandbox.open():
                pass

        try:
            asyncio.run(probe())
        except SandboxError as error:
            raise ConfigError(f"sandbox: {error}") from None

    def _check(self) -> None:
        super()._check()
        if self.tests.attempts > self.episode.max_turns:
            raise ConfigError("tests.attempts must be at most episode.max_turns")
