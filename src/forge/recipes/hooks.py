"""Functions of a user that a run calls as it goes: after each step, and with the rollouts of each step."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.sections import ConfigError
from ..observability import Reduce, record_metric
from ..types import Group

OnStep = Callable[[int, dict[str, float]], bool | Awaitable[bool | None] | None]
OnRollouts = Callable[[int, Sequence[Group]], Awaitable[None] | None]


def log(name: str, value: float, reduce: str = "mean") -> None:
    """Add a value to the metric `name` of the current step, which appears in metrics.jsonl, on the page and in
    trackers.

    It works in rewards, environments, losses and hooks, in whatever process they run.

    Args:
        reduce: how several values of a step become one: "mean", "sum", "max", "min" or "std".

    Raises:
        ValueError: the value is not finite, or `reduce` is unknown.
    """
    # Reductions have names here, so that a script need not import the enumeration.
    reductions = {reduction.value: reduction for reduction in Reduce}
    if reduce not in reductions:
        raise ValueError(f"reduce must be one of {', '.join(reductions)}, got {reduce!r}")
    record_metric(name, value, reductions[reduce])


@dataclass(frozen=True)
class Hooks:
    """User functions, sync or async, that a run calls; an exception in one ends the run.

    Args:
        on_step: called after each step with its number and metrics, before these are written, so that what it logs with
            `forge.log` is in the same row. If it returns True, training ends as after the last step: the held-out
            problems are evaluated, and the checkpoint and the model are written. Step 0 is the evaluation before
            training.
        on_rollouts: called before each step with its number and the groups that it trains on.

    Raises:
        ConfigError: one of them cannot be called.
    """

    on_step: OnStep | None = None
    on_rollouts: OnRollouts | None = None

    def __post_init__(self) -> None:
        for name in ("on_step", "on_rollouts"):
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise ConfigError(f"{name} must be a function of two arguments, got {hook!r:.80}")

    async def step(self, step: int, metrics: dict[str, float]) -> bool:
        """Call `on_step`, and return whether it ends the training.

        Raises:
            TypeError: it returned something else than True, False or None.
        """
        if self.on_step is None:
            return False
        # Only True ends a run: another true value, such as a loss that the hook happens to return, is an error.
        is_stopped = await _call_hook(self.on_step, step, metrics)
        if is_stopped is not None and not isinstance(is_stopped, bool):
            raise TypeError(f"on_step must return True to end the training, or False or None, got {is_stopped!r:.80}")
        return is_stopped is True

    async def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Call the user's `on_rollouts`, if set, with the step and the groups that the step trains on."""
        if self.on_rollouts is not None:
            await _call_hook(self.on_rollouts, step, groups)


async def _call_hook(function: Callable[..., Any], *arguments: Any) -> Any:
    # A sync function runs in the event loop, and so holds up the run; what takes long should be a coroutine.
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result
