"""The whole state of a run, in a checkpoint: saved while rollouts go on, and taken up again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ..controller import Service
from ..observability import Reduce, Run, record_metric
from ..observability.metrics import on_the_clock


async def save(
    record: Run,
    trainer: Service,
    dataset: Service,
    buffer: Service | None = None,
    critic: Service | None = None,
    reward: Service | None = None,
    *,
    keep: int = 2,
    async_write: bool = False,
) -> None:
    """Write a checkpoint of the trainer with the state of the others; what was logged before stays with it.

    Rollouts that are under way are not part of it. `resume` has them done again.

    Args:
        reward: one that learns; its replicas are asked for `state_dict`, and given all of them by `load_state_dict`.
        keep: how many of the newest checkpoints stay.
        async_write: go on as soon as the state is copied in memory.

    Raises:
        CheckpointFailed: this one, or the one before it that was not waited for, could not be written.
    """
    with on_the_clock("checkpoint"):
        await asyncio.to_thread(record.sync)
        state: dict[str, Any] = {}
        # In this order: what the buffer has seen was handed out before the position of the dataset. What comes into the
        # buffer between the two counts as under way.
        if buffer is not None:
            state["buffer"] = await buffer.state_dict.route()
        seen = None if buffer is None else state["buffer"]["seen"]
        state["dataset"] = await dataset.state_dict.route(seen)
        if reward is not None:
            state["reward"] = await reward.state_dict.fanout()
        if critic is not None:
            # Written whole before the trainer's, which makes it count. The trainer may still be writing the one before
            # this, and has not taken away what is older: two more are kept.
            await critic.save_checkpoint.call(_of_critic(record.checkpoints), None, keep + 2)
        await trainer.save_checkpoint.call(record.checkpoints, state, keep, not async_write)


async def resume(
    record: Run,
    trainer: Service,
    dataset: Service,
    buffer: Service | None = None,
    critic: Service | None = None,
    reward: Service | None = None,
) -> int:
    """Take up the checkpoint that the run goes on from, if it does.

    The dataset hands out again the samples that the buffer had not seen. Those that nobody remembers are counted in
    `dropped/forgotten`.

    Returns:
        how many rollouts the buffer holds.
    """
    if record.resume is None:
        return 0
    state = await trainer.load_checkpoint.route(record.resume)
    if critic is not None:
        await critic.load_checkpoint.route(str(Path(_of_critic(record.checkpoints)) / Path(record.resume).stem))
    if reward is not None and state.get("reward"):
        await reward.load_state_dict.fanout(state["reward"])
    if buffer is None:
        await dataset.load_state_dict.route(state["dataset"])
        return 0
    _recount(record, state["buffer"]["dropped"])
    forgotten = await dataset.load_state_dict.route(state["dataset"], state["buffer"]["seen"])
    return await buffer.load_state_dict.route(state["buffer"], forgotten)


def _of_critic(folder: str) -> str:
    return f"{folder}/critic"


def _recount(record: Run, dropped: dict[str, int]) -> None:
    """Count again what was dropped after the last row before the checkpoint: the process that had it is gone."""
    for reason, number in dropped.items():
        logged = sum(row.get(f"dropped/{reason}", 0.0) for row in record.history)
        if number > logged:
            record_metric(f"dropped/{reason}", number - logged, Reduce.SUM)
