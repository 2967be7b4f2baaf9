"""The usual components of a recipe, placed and set up as its configuration says. All are coroutines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .actors import DatasetActor, Generator, ReferenceModel, RewardActor, Trainer
from .controller import Service
from .observability import Run
from .store import VersionStore


async def dataset(cfg: Any, model: str, record: Run, **more: Any) -> Service:
    """The stream of data, which goes on after the loss of its process."""
    return await DatasetActor.options(**cfg.services.dataset).as_actor(
        model,
        seed=cfg.seed,
        journal=f"{record.recovery}/dataset",
        remember=cfg.checkpoint.remember,
        **cfg.dataset,
        **more,
    )


async def generator(cfg: Any, model: str, store: VersionStore, **sampling: Any) -> Service:
    """The policy that samples, with what differs from the defaults of `forge.types.Sampling`."""
    return await Generator.options(**cfg.services.generator).as_service(model, store=store, **sampling, **cfg.generator)


async def trainer(
    cfg: Any, model: str, record: Run, loss: Callable[..., Any], *, service: str = "trainer", **more: Any
) -> Service:
    """A trainer under `services.<service>`; further settings are those of `forge.actors.Trainer`. A second trainer of
    a run, such as a critic, keeps its checkpoints in a folder of its own."""
    folder = record.checkpoints if service == "trainer" else f"{record.checkpoints}/{service}"
    settings = {
        "optimizer": cfg.training.optimizer(),
        "shard_degree": cfg.parallelism.data_parallel_shard_degree,
        "recovery": folder if cfg.checkpoint.every else None,
        **cfg.training.trainer(),
    }
    if cfg.lora is not None:
        settings["lora"] = dict(cfg.lora)
    return await Trainer.options(**cfg.services[service]).as_actor(model, loss=loss, **(settings | more))


async def reward(cfg: Any) -> Service:
    """The reward functions."""
    return await RewardActor.options(**cfg.services.reward).as_service(**cfg.reward)


async def reference(cfg: Any, model: str, temperature: float = 1.0) -> Service:
    """A frozen model that scores batches."""
    return await ReferenceModel.options(**cfg.services.ref_model).as_service(
        model, seq_len=cfg.training.seq_len, temperature=temperature
    )


async def nothing() -> None:
    """In place of a component that this run does not need."""
