"""An actor of tests, in a process that does not import torch unless it is asked to reduce."""

from __future__ import annotations

import asyncio
import os
import socket

from forge.controller import ForgeActor, endpoint


class Place(ForgeActor):
    """Says where it is, and that it works."""

    @endpoint
    async def where(self) -> tuple[str, str, int]:
        return str(self.context), socket.gethostname(), os.getpid()

    @endpoint
    async def pause(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return socket.gethostname()

    @endpoint
    async def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    @endpoint
    def reduce(self) -> tuple[float, str]:
        """The sum over ranks of their numbers from 1, also in a group of its own and by an object."""
        import torch
        import torch.distributed as dist

        from forge.training.distributed import join, leave

        join(self.context.rank, self.context.world_size, self.context.rendezvous)
        try:
            values = torch.full((100_000,), float(self.context.rank + 1))
            dist.all_reduce(values)
            dist.all_reduce(values, group=dist.new_group(list(range(self.context.world_size))))
            names = [socket.gethostname()]
            dist.broadcast_object_list(names, src=self.context.world_size - 1)
            assert len(set(values.tolist())) == 1
            return float(values[0]), names[0]
        finally:
            leave()
