"""`forge watch`: a page over the folders that runs leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import Watch

__all__ = ["Watch"]


def __getattr__(name: str) -> Any:
    # Imported on first use: runs write their report, which needs no server.
    if name == "Watch":
        from .server import Watch

        return Watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
