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
    """The components whose state belongs to a checkpoint.

    Args:
        buffer: None for recipes without one.
        additional: other trainers, by the folder of their checkpoints: a critic, additional policies.
        reward: one that learns: its replicas have `state_dict` and `load_state_dict`.
    """

    trainer: Handle
    dataset: Handle
    buffer: Handle | None = None
    further: Mapping[str, Handle] = field(default_factory=dict)
    reward: Handle | None = None
    has_sampler: bool = False

    async def save(self, record: Run, *, keep: int = 2, async_write: bool = False) -> None:
        """Write a checkpoint of the trainer with the state of the others; what was logged before stays with it.

        Rollouts in flight are not part of it. `resume` has them done again.

        Args:
            keep: how many of the newest checkpoints stay.
            async_write: return as soon as the state is copied in memory.

        Raises:
            CheckpointFailed: this one, or the one before it that was not waited for, could not be written.
        """
        # The time is the run's, not a component's: all of them are asked.
        with on_the_clock("checkpoint"):
            await asyncio.to_thread(record.sync)
            state: dict[str, Any] = {}

            # In this order: what the buffer has seen was handed out before the position of the dataset. What comes into
            # the buffer between the two counts as in flight.
            if self.buffer is not None:
                state["buffer"] = await self.buffer.state_dict.route()

            seen = None if self.buffer is None else state["buffer"]["seen"]
            state["dataset"] = await self.dataset.state_dict.route(seen)
            if self.reward is not None:
                state["reward"] = await self.reward.state_dict.fanout()
            for folder, trainer in self.further.items():
                # Written whole before the trainer's, which makes it count. The trainer may still be writing the one
                # before this, and has not removed older ones: two more are kept.
                await trainer.save_checkpoint.call(f"{record.checkpoints}/{folder}", None, keep + 2)

            await self.trainer.save_checkpoint.call(record.checkpoints, state, keep, not async_write)

    async def forget_done(self) -> None:
        """Drop the samples whose groups have come in from the data set: only those in flight can be needed again."""
        if self.buffer is not None:
            await self.dataset.forget.route(await self.buffer.handled.route())
            await self.tell()

    async def tell(self) -> None:
        """Give the rewards of the groups that came in to the sampler of the data, if it has one."""
        if self.has_sampler and self.buffer is not None:
            await self.dataset.observe.route(await self.buffer.take_outcomes.route())

    async def resume(self, record: Run) -> None:
        """Restore the checkpoint that the run resumes from, if it does.

        The dataset hands out again the samples that the buffer had not seen. Those that are no longer known are counted
        in `dropped/forgotten`.
        """
        if record.resume is None:
            return
        state = await self.trainer.load_checkpoint.route(record.resume)
        name = Path(record.resume).stem
        for folder, trainer in self.further.items():
            await trainer.load_checkpoint.route(str(Path(record.checkpoints) / folder / name))
        if self.reward is not None and state.get("reward"):
            await self.reward.load_state_dict.fanout(state["reward"])
        if self.buffer is None:
            await self.dataset.load_state_dict.route(state["dataset"])
            return

        # What was dropped after the last row before the checkpoint: the process that had counted it is gone.
        for reason, number in state["buffer"]["dropped"].items():
            logged = sum(row.get(f"dropped/{reason}", 0.0) for row in record.history)
            if number > logged:
                record_metric(f"dropped/{reason}", number - logged, Reduce.SUM)

        forgotten = await self.dataset.load_state_dict.route(state["dataset"], state["buffer"]["seen"])
        await self.buffer.load_state_dict.route(state["buffer"], forgotten)
