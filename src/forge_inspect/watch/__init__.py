"""`forge watch`: a page over the folders of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .server import Watch

__all__ = ["Watch"]


def __getattr__(name: str) -> type[Watch]:
    # Imported on first use: runs write their report, which needs no server.
    if name == "Watch":
        from .server import Watch

        return Watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
