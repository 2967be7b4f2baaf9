"""The sandbox as a service of a run."""

from typing import Any

from forge.runtime.controller import ForgeActor, endpoint

from .sandbox import Result, Sandbox


class SandboxedPythonCoder(ForgeActor):
    """A service that runs programs, each replica in its own sandbox.

    coder = await SandboxedPythonCoder.options(num_replicas=2).as_service(memory_mb=1024)
    result = await coder.execute.route("print(6 * 7)")

    Args:
        settings: the settings of `forge_sandbox.Sandbox`.
    """

    constructor_checks = True

    def __init__(self, **settings: Any) -> None:
        self.sandbox = Sandbox(**settings)

    async def setup(self) -> None:
        """Start the sandbox."""
        await self.sandbox.start()

    @endpoint
    async def execute(self, code: str, stdin: str = "", time_limit: float = 5.0) -> Result:
        """Run a program, and return its result; see `Sandbox.run`."""
        return await self.sandbox.run(code, stdin, time_limit)

    @endpoint
    async def level(self) -> str:
        """Return the isolation level in use, see docs/sandbox.md."""
        return self.sandbox.level

    async def teardown(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()
