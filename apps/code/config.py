"""What a run on programming tasks can be told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from apps.grpo.agents import AgentConfig
from forge.config import ConfigError, Section
from forge.envs.sandbox import SandboxError
from forge.envs.sandbox.config import SandboxConfig


@dataclass
class TestsConfig(Section):
    """How programs are tested: `credit` for "all" tests or the "share" that pass, `time_limit` seconds for a program
    with its tests, `attempts` at a task."""

    credit: Literal["all", "share"] = "share"
    time_limit: float = 2.0
    attempts: int = 1


@dataclass
class CodeConfig(AgentConfig):
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    tests: TestsConfig = field(default_factory=TestsConfig)

    def check_reward(self) -> None:
        """ValueError: programs cannot be held back here."""

        async def probe() -> None:
            async with self.sandbox.open():
                pass

        try:
            asyncio.run(probe())
        except SandboxError as error:
            raise ConfigError(f"sandbox: {error}") from None

    def validate(self) -> None:
        super().validate()
        self.sandbox.validate()
        if self.tests.time_limit <= 0 or not 1 <= self.tests.attempts <= self.episode.max_turns:
            raise ConfigError(
                "tests.time_limit must be above 0, and tests.attempts at least 1 and at most episode.max_turns"
            )
