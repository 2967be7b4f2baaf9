"""Servers of a run: an OpenAI-compatible endpoint for its policy, and `forge watch`, a page over its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .server import Server

__all__ = ["Server"]


def __getattr__(name: str) -> type[Server]:
    # Imported on first use: it needs an optional package.
    if name == "Server":
        from .server import Server

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
