"""Configuration of runs on programming tasks."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field, PositiveInt

from forge.config import ConfigError
from forge.config.plugin import construct
from forge.recipes.rl_config import RLConfig
from forge_sandbox import CodeVerifier, Sandbox, SandboxError


class CodeConfig(RLConfig):
    """Programming tasks, in a sandbox."""

    sandbox: dict[str, Any] = Field(default_factory=dict)
    """Settings of `forge_sandbox.Sandbox`."""
    tests: dict[str, Any] = Field(default_factory=dict)
    """Settings of `forge_sandbox.CodeVerifier`; `credit` is "share" and `time_limit` 2 s by default."""
    attempts: PositiveInt = 1
    """At a task, at most `episode.max_turns`."""

    @property
    def multi_turn(self) -> bool:
        return True

    def open(self) -> Sandbox:
        """Not started yet. ValueError: an unknown setting, or a wrong value."""
        return construct(Sandbox, self.sandbox, "sandbox")

    def verifier(self, sandbox: Sandbox) -> CodeVerifier:
        """The verifier of whole responses as programs. ValueError as `open`."""
        fixed = {"sandbox": sandbox, "program": str}
        if own := sorted(fixed.keys() & self.tests.keys()):
            raise ConfigError(f"tests.{own[0]} cannot be set here")
        return construct(CodeVerifier, {"credit": "share", "time_limit": 2.0, **self.tests, **fixed}, "tests")

    @property
    def scorers(self) -> list[Any]:
        return [self.verifier(self.open())]

    def check_reward(self) -> None:
        """ConfigError: programs cannot be confined on this machine."""

        async def probe() -> None:
            async with self.open():
                pass

        try:
            asyncio.run(probe())
        except SandboxError as error:
            raise ConfigError(f"sandbox: {error}") from None

    def _check(self) -> None:
        super()._check()
        self.verifier(self.open())
        if self.attempts > self.episode.max_turns:
            raise ConfigError("attempts must be at most episode.max_turns")
