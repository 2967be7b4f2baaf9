"""A light actor of tests: its process does not import torch."""

import asyncio
import os
import socket

from forge.runtime.controller import ForgeActor, endpoint


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
