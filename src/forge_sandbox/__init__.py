"""A sandbox for untrusted programs, see docs/sandbox.md."""

from typing import TYPE_CHECKING

from .cases import Case, forgeable, read_cases
from .code_verifier import CodeVerifier
from .sandbox import Result, Sandbox
from .worker import SandboxError

if TYPE_CHECKING:
    from .coder import SandboxedPythonCoder

__all__ = [
    "Case",
    "CodeVerifier",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxedPythonCoder",
    "forgeable",
    "read_cases",
]


def __getattr__(name: str) -> object:
    # Imported on first use: the actor needs Monarch, which takes seconds to import.
    if name == "SandboxedPythonCoder":
        from .coder import SandboxedPythonCoder

        return SandboxedPythonCoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
