"""A prepared run, and what it does after each step: evaluate, log, and write a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.sections import ConfigError
from ..observability import Run
from ..observability.console import log
from ..observability.metrics import drain, on_the_clock
from ..runtime.controller import drain_metrics
from ..runtime.store import Store
from .checkpoint import RunState
from .hooks import Hooks
from .preemption import Preempted, Preemption

if TYPE_CHECKING:
    from .schema import TrainingRecipe

Evaluate = Callable[[], Awaitable[dict[str, float]]]


class Job(NamedTuple):
    """A prepared run: the model's local folder, the held-out items to evaluate on, the run's folder, and the store that
    carries weights from the trainer to generators."""

    model: str
    held_out: list[Any]
    record: Run
    store: Store
    preemption: Preemption | None = None  # where there are checkpoints
    hooks: Hooks = Hooks()
    sets: Mapping[str, list[Any]] = {}  # the held-out items of `eval.sets`

    async def end_step(
        self,
        cfg: TrainingRecipe,
        state: RunState,
        step: int,
        metrics: dict[str, float],
        evaluate: Evaluate,
        is_done: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Evaluate, log and write a checkpoint, whichever is due after this step; step 0 is before the first. Return
        whether training ends here.

        Args:
            is_done: whether training ends here although steps are left; asked once the step is logged.

        Raises:
            Preempted: the run has to end before its last step; its checkpoint is written.
        """
        last = step == cfg.training.steps
        if last or step == 0 or cfg.eval.due(step):
            metrics = metrics | await evaluate()

        # The profile of the next step starts with it, so it is asked for at the end of this one.
        profiles = {} if last else cfg.metrics.profiles(step + 1, self.record.folder)
        snapshot = await drain_metrics(profiles)

        # Before the row is written, so that it has what the hook logs, and an evaluation if the run ends with it.
        is_stopped = False
        if self.hooks.on_step is not None:
            with on_the_clock("on_step"):
                is_stopped = await self.hooks.step(step, {**snapshot.values(), **metrics})
                snapshot.merge(drain())  # what the hook has logged belongs to this step

        if is_stopped and not (last or cfg.eval.all_due(step)):
            metrics = metrics | await evaluate()
            snapshot.merge(await drain_metrics({}))
        row = self.record.log(step, snapshot, **metrics)
        best = getattr(cfg.eval, "best", None)
        if best is not None:
            await self.keep_best(state, best, row)
        await state.forget_done()

        # A run that ends here anyway needs no early end.
        ending = last or is_stopped or is_done()
        reason = self.preemption.reason() if self.preemption is not None and not ending else None
        if step and (reason or cfg.checkpoint.due(step, ending)):
            started_at = time.monotonic()
            in_background = cfg.checkpoint.async_write and reason is None
            await state.save(self.record, keep=cfg.checkpoint.keep, async_write=in_background)
            if self.preemption is not None:
                self.preemption.saved(time.monotonic() - started_at)

        if reason:
            progress = f"after step {step}, saved; --resume auto continues it" if step else "before its first step"
            raise Preempted(f"{reason}: the run ended {progress}")
        return ending

    async def run_steps(
        self,
        cfg: TrainingRecipe,
        state: RunState,
        train_step: Callable[[int], Awaitable[dict[str, float]]],
        evaluate: Evaluate,
        is_done: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train the steps that are left, with an evaluation before the first, and export the model.

        Args:
            train_step: trains the step of this number and returns its metrics.
            evaluate, is_done: as of `end_step`.
        """
        is_ended = self.record.start == 0 and await self.end_step(cfg, state, 0, {}, evaluate)
        for step in range(self.record.start + 1, cfg.training.steps + 1):
            if is_ended or is_done():
                break
            metrics = await train_step(step)
            is_ended = await self.end_step(cfg, state, step, metrics, evaluate, is_done)

        await state.trainer.export_model.call(self.record.model)

    async def keep_best(self, state: RunState, metric: str, row: Mapping[str, float]) -> None:
        """Export the model of a step whose metric exceeds all earlier steps'."""
        if row["step"] == 0 and metric not in row:  # all sets are evaluated then
            names = ", ".join(name for name in row if name.startswith("eval/"))
            raise ConfigError(f"eval.best: no evaluation has the metric {metric!r}; there are {names}")
        values = [earlier[metric] for earlier in self.record.history[:-1] if metric in earlier]
        if metric in row and row[metric] > max(values, default=-math.inf):
            # Compared with all rows of the run, so that a resumed one needs no additional state.
            await state.trainer.export_model.call(self.record.best)
            log.info("%s is the model of step %d, with %s %.3f", self.record.best, row["step"], metric, row[metric])
