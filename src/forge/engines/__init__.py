"""Generation engines: tokens in, tokens with log-probabilities and weight versions out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.engines.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes seconds.
    if name == "EmbeddedEngine":
        from forge.engines.engine import EmbeddedEngine

        return EmbeddedEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
