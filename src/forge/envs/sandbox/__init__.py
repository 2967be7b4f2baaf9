"""A sandbox for programs that nobody trusts, see docs/sandbox.md."""

from .sandbox import Result, Sandbox, Session
from .worker import SandboxError

__all__ = ["Result", "Sandbox", "SandboxError", "Session"]
