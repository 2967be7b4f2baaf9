"""What the infrastructure tells the person who watches a run."""

from __future__ import annotations

import asyncio
import sys


def say(text: str) -> None:
    """One message to standard error."""
    print(f"forge: {text}", file=sys.stderr, flush=True)


def tell_end(task: asyncio.Task) -> None:
    """Done-callback of a task that should never end by itself: says so if it failed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        say(f"{task.get_coro().__qualname__} ended with {type(error).__name__}: {error}")  # type: ignore[union-attr]
