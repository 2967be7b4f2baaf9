"""Configuration of a run on programming tasks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from apps.grpo.agents import AgentConfig
from forge.config import ConfigError
from forge.plugin import construct
from forge_sandbox import CodeVerifier, Sandbox, SandboxError


@dataclass
class CodeConfig(AgentConfig):
    """`sandbox`: settings of `forge_sandbox.Sandbox`; `tests`: of `forge_sandbox.CodeVerifier`, `credit` is "share" and
    `time_limit` 2 s by default; `attempts` at a task."""

    sandbox: dict[str, Any] = field(default_factory=dict)
    tests: dict[str, Any] = field(default_factory=dict)
    attempts: int = 1

    def open(self) -> Sandbox:
        """Not started yet. ValueError: a setting that it has not, or a wrong value."""
        return construct(Sandbox, self.sandbox, "sandbox")

    def verifier(self, sandbox: Sandbox) -> CodeVerifier:
        """Of whole responses as programs. ValueError as `open`."""
        fixed = {"sandbox": sandbox, "program": str}
        if own := sorted(fixed.keys() & self.tests.keys()):
            raise ConfigError(f"tests.{own[0]} cannot be set here")
        return construct(CodeVerifier, {"credit": "share", "time_limit": 2.0, **self.tests, **fixed}, "tests")

    def check_reward(self) -> None:
        """ConfigError: programs cannot be confined on this machine."""

        async def probe() -> None:
            async with self.open():
                pass

        try:
            asyncio.run(probe())
        except SandboxError as error:
            raise ConfigError(f"sandbox: {error}") from None

    def validate(self) -> None:
        super().validate()
        try:
            self.verifier(self.open())
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not 1 <= self.attempts <= self.episode.max_turns:
            raise ConfigError("attempts must be at least 1 and at most episode.max_turns")
