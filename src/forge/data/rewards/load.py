"""Functions by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ...plugin import resolve

RewardFunction = Callable[..., Any]


def load_reward(name: str, what: str = "reward") -> RewardFunction:
    """Resolve `package.module:Name`, or a name from `forge.data.rewards`; a class is instantiated without arguments.

    Args:
        what: the errors call it.

    Raises:
        ValueError: nothing of this name, or it is not callable.
    """
    found = resolve(name, what, "forge.data.rewards")
    try:
        made = found() if inspect.isclass(found) else found
    except TypeError as error:
        raise ValueError(f"{what} {name!r} cannot be made without arguments ({error}); name a function") from error
    if not callable(made):
        raise ValueError(f"{what} {name!r} is not callable")
    return made
