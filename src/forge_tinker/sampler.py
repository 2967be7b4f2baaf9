"""Sampling from any adapter: one engine, which draws for one adapter after the other."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge.engines import EmbeddedEngine
from forge.engines.weights import read_checkpoint
from forge.models.weight_layouts import merge_adapters
from forge.types import Completion, Sampling

from .adapters import ALPHA, read_factors

Waiting = tuple[Sequence[int], Sampling, "asyncio.Future[list[Completion]]"]


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
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(adapter, []).append((prompt, sampling, future))
        self._wake.set()
        return await future

    async def _take_turns(self) -> None:
        running: set[asyncio.Future[Any]] = set()
        while True:
            running = {future for future in running if not future.done()}
            # The adapter in use keeps its turn while no other waits; others come in the order of their first request.
            adapter = next(iter(self._queues), None)
            if adapter is None and None not in self._queues:
                self._wake.clear()
                await self._wake.wait()
                continue
            if adapter != self._loaded:
                if running:
                    await asyncio.wait(running)
                try:
                    await self._load_adapter(adapter)
                except Exception as error:  # of the weights or, for good, of the engine
                    for *_, future in self._queues.pop(adapter):
                        future.set_exception(error)
                    continue
            for prompt, sampling, future in self._queues.pop(adapter):
                try:
                    drawn = asyncio.wrap_future(self.engine.submit(prompt, sampling))
                except Exception as error:  # of the request or, for good, of the engine
                    future.set_exception(error)
                    continue
                drawn.add_done_callback(partial(settle, future))
                running.add(drawn)

    async def _load_adapter(self, adapter: Path | None) -> None:
        def update() -> Any:
            factors = {}
            for path, (a, b) in read_factors(adapter).items() if adapter else ():
                factors[f"{path}.lora_A.weight"] = a
                factors[f"{path}.lora_B.weight"] = b * (ALPHA / len(a))
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


def settle(future: asyncio.Future[Any], source: asyncio.Future[Any]) -> None:
    """Give a future the result or the error of another one; a cancelled one is left as it is."""
    if future.cancelled() or source.cancelled():
        return
    if (error := source.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(source.result())
