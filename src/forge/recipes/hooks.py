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
    """Add a value to a metric of the current step, `name` in metrics.jsonl, the page and trackers.

    It works in rewards, environments, losses and hooks, in whatever process they run.

    Args:
        reduce: what becomes of several values in a step: "mean", "sum", "max", "min" or "std".

    Raises:
        ValueError: the value is not finite, or `reduce` is unknown.
    """
    # Names instead of the enumeration: this function is for scripts.
    reductions = {reduction.value: reduction for reduction in Reduce}
    if reduce not in reductions:
        raise ValueError(f"reduce must be one of {', '.join(reductions)}, got {reduce!r}")
    record_metric(name, value, reductions[reduce])


@dataclass(frozen=True)
class Hooks:
    """A user's functions, sync or async. What they raise ends the run.

    on_step: is called with the step and its metrics before these are written, so that what it logs with `forge.log`
        is in the same row. True ends the training: the held-out problems are evaluated, and the checkpoint and the
        model are written, as after the last step. Step 0 is the evaluation before training.
    on_rollouts: is called with the step and the groups that it will train on, before it does.

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
        """Call `on_step`; returns whether the training ends.

        Raises:
            TypeError: it returned something else than True, False or None, which might have been meant to end it.
        """
        if self.on_step is None:
            return False
        # Not by truth: a hook that ends with a number, such as a loss, does not ask for the end of the run.
        verdict = await _call_hook(self.on_step, step, metrics)
        if not (verdict is None or isinstance(verdict, bool)):
            raise TypeError(f"on_step must return True to end the training, or False or None, got {verdict!r:.80}")
        return bool(verdict)

    async def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Call `on_rollouts`."""
        if self.on_rollouts is not None:
            await _call_hook(self.on_rollouts, step, groups)


async def _call_hook(function: Callable[..., Any], *arguments: Any) -> Any:
    # In the event loop: what takes long belongs into a coroutine.
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result
