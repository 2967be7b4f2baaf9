"""Sampling from any adapter: one engine, which draws for one adapter after the other."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from forge.engines import EmbeddedEngine
from forge.engines.weights import read_checkpoint
from forge.models.weight_layouts import merge_adapters
from forge.types import Completion, Sampling

from .adapters import WEIGHTS, scale_factors

Waiting = tuple[Sequence[int], Sampling, "asyncio.Future[Future[list[Completion]]]"]


class Sampler:
    """An engine that draws completions of a base model and of its adapters.

    The requests of one adapter are drawn together. Those of another one wait until they have ended: then its weights,
    merged with the base model's, replace the engine's. Adapters take turns, so that none waits for ever.

    Args:
        folder: of the base model.
        settings: fields of `forge.engines.EngineSettings`.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.engine = EmbeddedEngine(folder, **settings)
        self._queues: dict[Path | None, list[Waiting]] = {}
        self._loaded: Path | None = None
        self._versions = 0
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._take_turns())

    async def sample(self, adapter: Path | None, prompt: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Draw completions by an adapter's folder; None: by the base model.

        Raises:
            ValueError: the prompt or a setting is invalid.
        """
        future: asyncio.Future[Future[list[Completion]]] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(adapter, []).append((prompt, sampling, future))
        self._wake.set()
        return await asyncio.wrap_future(await future)

    async def _take_turns(self) -> None:
        running: list[Future[Any]] = []
        while True:
            running = [drawn for drawn in running if not drawn.done()]
            # The adapter in use keeps its turn while no other waits; others come in the order of their first request.
            adapter = next(iter(self._queues), None)
            if adapter is None and None not in self._queues:
                self._wake.clear()
                await self._wake.wait()
                continue
            if adapter != self._loaded:
                await asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)
                try:
                    await self._load_adapter(adapter)
                except Exception as error:  # of the weights or, for good, of the engine
                    for *_, future in self._queues.pop(adapter):
                        future.set_exception(error)
                    continue
            for prompt, sampling, future in self._queues.pop(adapter):
                try:
                    running.append(self.engine.submit(prompt, sampling))
                    future.set_result(running[-1])
                except Exception as error:  # of the request or, for good, of the engine
                    future.set_exception(error)

    async def _load_adapter(self, adapter: Path | None) -> None:
        def update() -> Any:
            factors = scale_factors(load_file(adapter / WEIGHTS)) if adapter else {}
            return self.engine.update_weights(merge_adapters(read_checkpoint(self.folder), factors), self._versions)

        self._versions += 1
        await asyncio.wrap_future(await asyncio.to_thread(update))
        self._loaded = adapter

    def forget(self, folder: Path) -> None:
        """Read a folder again before the next draw by it: it was overwritten."""
        if self._loaded == folder:
            self._loaded = Path()

    def close(self) -> None:
        """Stop the engine."""
        self._task.cancel()
        self.engine.close()
