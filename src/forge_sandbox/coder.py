"""Programs of a policy, run in a sandbox, as a service."""

from __future__ import annotations

from typing import Any

from forge.controller import ForgeActor, endpoint

from .sandbox import Result, Sandbox


class SandboxedPythonCoder(ForgeActor):
    """Sandboxes in processes of their own; several replicas share the programs.

    coder = await SandboxedPythonCoder.options(num_replicas=2).as_service(memory_mb=1024)
    result = await coder.execute.route("print(6 * 7)")

    Args:
        settings: of `forge_sandbox.Sandbox`.
    """

    def __init__(self, **settings: Any) -> None:
        self.sandbox = Sandbox(**settings)

    async def setup(self) -> None:
        await self.sandbox.start()

    @endpoint
    async def execute(self, code: str, stdin: str = "", time_limit: float = 5.0) -> Result:
        """Run a program, for so many seconds at most. Raises as `Sandbox.run` does."""
        return await self.sandbox.run(code, stdin, time_limit)

    @endpoint
    async def level(self) -> str:
        """The level that holds programs back, see docs/sandbox.md."""
        return self.sandbox.level

    async def teardown(self) -> None:
        await self.sandbox.close()
