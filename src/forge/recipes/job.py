"""A prepared run: its state in checkpoints, and what it does after each step."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..config.sections import ConfigError
from ..observability import Reduce, Run, record_metric
from ..observability.console import log
from ..observability.metrics import drain, on_the_clock
from ..runtime.controller import drain_metrics
from ..runtime.controller.handle import Handle
from ..runtime.store import Store
from .hooks import Hooks
from .preemption import Preempted, Preemption
from .schema import TrainingRecipe


@dataclass
class RunState:
    """The components of a run whose state belongs to a checkpoint.

    Args:
        trainer: of the policy.
        buffer: the replay buffer; None for recipes without one.
        other_trainers: a critic and the trainers of additional policies, by the folder of their checkpoints within the
            run's checkpoint folder.
        reward: a reward service that learns, whose replicas have `state_dict` and `load_state_dict`; None: it does not.
        has_sampler: whether the dataset chooses rows by the rewards of earlier ones.
    """

    trainer: Handle
    dataset: Handle
    buffer: Handle | None = None
    other_trainers: Mapping[str, Handle] = field(default_factory=dict)
    reward: Handle | None = None
    has_sampler: bool = False

    async def save(self, record: Run, *, keep: int = 2, async_write: bool = False) -> None:
        """Write a checkpoint of all components, after the metrics that were logged so far.

        Rollouts in flight are not part of it: `resume` repeats them.

        Args:
            keep: how many of the newest checkpoints stay.
            async_write: return as soon as the state is copied in memory.

        Raises:
            CheckpointFailed: this checkpoint, or the previous one if it was written in the background, could not be
                written.
        """
        # The time counts for the run, and not for one component, since all of them take part.
        with on_the_clock("checkpoint"):
            await asyncio.to_thread(record.sync)

            # The buffer first: all that it has seen then lies before the position of the dataset. A group that arrives
            # between the two counts as in flight.
            state: dict[str, Any] = {}
            seen = None
            if self.buffer is not None:
                state["buffer"] = await self.buffer.state_dict.route()
                seen = state["buffer"]["seen"]
            state["dataset"] = await self.dataset.state_dict.route(seen)
            if self.reward is not None:
                state["reward"] = await self.reward.state_dict.fanout()

            # These are complete before the policy's, which makes the whole checkpoint count. The policy's trainer may
            # still be writing its previous checkpoint, with older ones not yet removed, so here two more are kept.
            for folder, trainer in self.other_trainers.items():
                await trainer.save_checkpoint.call(f"{record.checkpoints}/{folder}", None, keep + 2)

            await self.trainer.save_checkpoint.call(record.checkpoints, state, keep, not async_write)

    async def report_outcomes(self) -> None:
        """Pass the outcomes of the groups that the buffer has received on to the dataset's sampler, if it has one."""
        if self.has_sampler and self.buffer is not None:
            await self.dataset.observe.route(await self.buffer.take_outcomes.route())

    async def resume(self, record: Run) -> None:
        """Restore the checkpoint that the run resumes from; do nothing if it starts at step 0.

        The dataset returns the samples again that the buffer had not seen. Samples that it no longer remembers are
        counted in the metric `dropped/forgotten`.
        """
        if record.resume is None:
            return

        state = await self.trainer.load_checkpoint.route(record.resume)
        name = Path(record.resume).stem
        for folder, trainer in self.other_trainers.items():
            await trainer.load_checkpoint.route(str(Path(record.checkpoints) / folder / name))
        if self.reward is not None and state.get("reward"):
            await self.reward.load_state_dict.fanout(state["reward"])

        if self.buffer is None:
            await self.dataset.load_state_dict.route(state["dataset"])
            return

        # Groups that were dropped between the last row of metrics and the checkpoint: the process that counted them has
        # ended, so they are recorded again.
        for reason, count in state["buffer"]["dropped"].items():
            logged_count = sum(row.get(f"dropped/{reason}", 0.0) for row in record.history)
            if count > logged_count:
                record_metric(f"dropped/{reason}", count - logged_count, Reduce.SUM)

        forgotten = await self.dataset.load_state_dict.route(state["dataset"], state["buffer"]["seen"])
        await self.buffer.load_state_dict.route(state["buffer"], forgotten)


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
    ) -> bool:
        """Do what is due after a step: evaluate, log its metrics, write a checkpoint. Return whether training ends.

        Args:
            state: the components that a checkpoint saves.
            step: its number; 0 stands for the evaluation before the first step.
            metrics: of the step.
            evaluate: returns the metrics of the held-out items that are due.

        Raises:
            Preempted: the run has to end before its last step; its checkpoint is written.
        """
        last = step == cfg.training.steps
        if last or step == 0 or cfg.eval.due(step):
            metrics = metrics | await evaluate()

        # A profile covers a step from its start, so the one of the next step is requested here.
        snapshot = await drain_metrics({} if last else cfg.metrics.profiles(step + 1, self.record.folder))

        # The hook runs before the row is written, so that the row has what the hook logs, and also the evaluation if
        # the hook ends the run.
        is_stopped = False
        if self.hooks.on_step is not None:
            with on_the_clock("on_step"):
                is_stopped = await self.hooks.step(step, {**snapshot.values(), **metrics})
                snapshot.merge(drain())

        # At step 0 all sets are due.
        all_due = step == 0 or all(every and step % every == 0 for every in cfg.eval.intervals().values())
        if is_stopped and not (last or all_due):
            metrics = metrics | await evaluate()
            snapshot.merge(await drain_metrics({}))
        row = self.record.log(step, snapshot, **metrics)
        if (best := getattr(cfg.eval, "best", None)) is not None:
            await self.keep_best(state, best, row)
        if state.buffer is not None:
            # Only the samples in flight may be needed again after a resume.
            await state.dataset.forget.route(await state.buffer.handled.route())
            await state.report_outcomes()

        # Preemption matters only for a run that would go on.
        ending = last or is_stopped or row.get("eval/accuracy", -1.0) >= cfg.eval.stop_at
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

    async def begin(self, cfg: TrainingRecipe, state: RunState, evaluate: Evaluate) -> bool:
        """Evaluate before the first step, unless the run is resumed; return whether there is nothing left to train.

        The arguments are the same as `end_step`'s.
        """
        return (
            await self.end_step(cfg, state, 0, {}, evaluate)
            if self.record.start == 0
            else self.record.history[-1].get("eval/accuracy", -1.0) >= cfg.eval.stop_at
        )

    async def run_steps(
        self,
        cfg: TrainingRecipe,
        state: RunState,
        train_step: Callable[[int], Awaitable[dict[str, float]]],
        evaluate: Evaluate,
    ) -> None:
        """Evaluate before the first step, train the remaining steps, and export the model.

        Args:
            train_step: trains the step of this number and returns its metrics.
            evaluate: as of `end_step`.
        """
        is_ended = await self.begin(cfg, state, evaluate)
        for step in range(self.record.start + 1, cfg.training.steps + 1):
            if is_ended:
                break
            is_ended = await self.end_step(cfg, state, step, await train_step(step), evaluate)

        await state.trainer.export_model.call(self.record.model)

    async def keep_best(self, state: RunState, metric: str, row: Mapping[str, float]) -> None:
        """Export the model to the run's folder `best` if its metric is higher than in all earlier steps.

        Args:
            metric: name of the metric, as `eval.best`.
            row: the metrics of this step.

        Raises:
            ConfigError: the evaluation before training has no such metric.
        """
        if row["step"] == 0 and metric not in row:  # at step 0 all sets are evaluated
            names = ", ".join(name for name in row if name.startswith("eval/"))
            raise ConfigError(f"eval.best: no evaluation has the metric {metric!r}; there are {names}")

        # Compared with all earlier rows of the run, so that a resumed one needs no additional state.
        earlier_values = [earlier[metric] for earlier in self.record.history[:-1] if metric in earlier]
        if metric in row and row[metric] > max(earlier_values, default=-math.inf):
            await state.trainer.export_model.call(self.record.best)
            log.info("%s is the model of step %d, with %s %.3f", self.record.best, row["step"], metric, row[metric])
