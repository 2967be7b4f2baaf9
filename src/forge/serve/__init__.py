"""Addresses of a run: an OpenAI-compatible endpoint for its policy, and `forge watch`, a page over its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import Server

__all__ = ["Server"]


def __getattr__(name: str) -> Any:
    # Imported on first use: it needs an extra.
    if name == "Server":
        from .server import Server

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
