"""The state of a run: saved in checkpoints while rollouts continue, and restored from them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..observability import Reduce, Run, record_metric
from ..observability.metrics import on_the_clock
from ..runtime.controller.handle import Handle


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
            state: dict[str, Any] = {}

            # The buffer first: all that it has seen then lies before the position of the dataset. A group that arrives
            # between the two counts as in flight.
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
        for reason, number in state["buffer"]["dropped"].items():
            logged = sum(row.get(f"dropped/{reason}", 0.0) for row in record.history)
            if number > logged:
                record_metric(f"dropped/{reason}", number - logged, Reduce.SUM)

        forgotten = await self.dataset.load_state_dict.route(state["dataset"], state["buffer"]["seen"])
        await self.buffer.load_state_dict.route(state["buffer"], forgotten)
