"""How far rollouts may run ahead of the trainer: the one number that makes a loop synchronous or asynchronous."""

from __future__ import annotations

import asyncio


class Window:
    """Admits rollouts so that what they sample is at most `max_policy_age` versions old when it trains.

    Rollout number i trains in step `i // batch_size`; it may start once version `i // batch_size - max_policy_age` is
    being served. With `max_policy_age` 0 that is lock-step: generation waits for every update.

    Args:
        batch_size: rollouts of one training step.
        steps: training steps of the run; no rollout beyond them is admitted.
        version: the version served at the start.
        held: rollouts beyond it that were done before.
    """

    def __init__(self, batch_size: int, max_policy_age: int, steps: int, version: int = 0, held: int = 0) -> None:
        if max_policy_age < 0:
            raise ValueError(f"max_policy_age must be at least 0, got {max_policy_age}")
        self.batch_size, self.max_policy_age = batch_size, max_policy_age
        self.end = steps * batch_size
        self.admitted = self.numbered = version * batch_size + held
        self.version = version
        self._changed = asyncio.Condition()

    async def admit(self) -> int:
        """Wait until one more rollout may start; returns its number. Waits for ever once the run has all it needs."""
        async with self._changed:
            await self._changed.wait_for(self._open)
            self.admitted += 1
            self.numbered += 1  # a refunded rollout is replaced under a number of its own
            return self.numbered - 1

    async def advance(self, version: int) -> None:
        """The policy now serves `version`."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def refund(self, rollouts: int) -> None:
        """These rollouts gave nothing to train on (dropped): admit as many again."""
        async with self._changed:
            self.admitted -= rollouts
            self._changed.notify_all()

    def _open(self) -> bool:
        return self.admitted < min(self.end, (self.version + self.max_policy_age + 1) * self.batch_size)
