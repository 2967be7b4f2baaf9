"""The usual components of a recipe, placed and set up as its configuration says. All are coroutines."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from .actors import DatasetActor, Generator, ReferenceModel, ReplayBuffer, RewardActor, Trainer
from .controller import Service
from .observability import Run
from .store import VersionStore


async def dataset(cfg: Any, model: str, record: Run, *, in_turn: bool = False) -> Service:
    """The stream of data, which goes on after the loss of its process. `in_turn`: what it hands out has been trained on
    whenever a checkpoint is written, so that nothing is ever handed out again."""
    return await DatasetActor.options(**cfg.placement("dataset")).as_actor(
        model,
        kind=cfg.dataset.kind,
        seed=cfg.seed,
        journal=f"{record.recovery}/dataset",
        remember=0 if in_turn else cfg.checkpoint.remember,
        **cfg.dataset,
    )


async def generator(cfg: Any, model: str, store: VersionStore, **sampling: Any) -> Service:
    """The policy that samples, with what differs from the defaults of `forge.types.Sampling`; served to others as well
    where `serve` says so."""
    options, at = Generator.options(**cfg.placement("generator")), None
    if cfg.serve.port is not None:
        from .serve.server import bind

        at = bind(cfg.serve.host, cfg.serve.port)
    policy = await options.as_service(model, store=store, **sampling, **cfg.generator)
    if at is not None:
        from transformers import AutoTokenizer

        from .serve import Server  # the configuration has seen that it can be imported

        server = Server(policy, AutoTokenizer.from_pretrained(model), cfg.run.name)
        print(f"{cfg.run.name} is served at {await server.beside(at)}", flush=True)
    return policy


async def trainer(
    cfg: Any, model: str, record: Run, loss: Callable[..., Any], *, service: str = "trainer", **more: Any
) -> Service:
    """A trainer under `services.<service>`; further settings are those of `forge.actors.Trainer`. A second trainer of
    a run, such as a critic, keeps its checkpoints in a folder of its own."""
    folder = record.checkpoints if service == "trainer" else f"{record.checkpoints}/{service}"
    settings = {
        "optimizer": cfg.training.optimizer(),
        "backend": cfg.trainer.backend,
        "parallelism": {**cfg.parallelism},
        "colocated": getattr(cfg, "colocated", False),
        "recovery": folder if cfg.checkpoint.every else None,
        "lora": None if cfg.lora is None else {**cfg.lora},
        **cfg.training.trainer(),
    }
    return await Trainer.options(**cfg.placement(service)).as_actor(model, loss=loss, **(settings | more))


async def critic(cfg: Any, model: str, record: Run, loss: Callable[..., Any]) -> Service:
    """A trainer of values beside the policy's, from `critic.model` or the policy's own start."""
    optimizer = cfg.training.optimizer() | {"learning_rate": cfg.critic.learning_rate}
    own = {"service": "critic", "report": "critic", "head": "value", "backend": "fsdp", "optimizer": optimizer}
    return await trainer(cfg, cfg.critic.model or model, record, loss, **own)


async def reward(cfg: Any) -> Service:
    """The reward functions."""
    return await RewardActor.options(**cfg.placement("reward")).as_service(**cfg.reward.settings())


async def replay_buffer(cfg: Any, record: Run, batch_size: int, replace: int = 0) -> Service:
    """Where rollouts wait, for two batches of each version that may be under way. `replace`: how many groups that teach
    nothing are replaced for each one of a batch."""
    return await ReplayBuffer.options(**cfg.placement("replay_buffer")).as_actor(
        2 * batch_size * (cfg.async_.max_policy_age + 1),
        seed=cfg.seed,
        journal=f"{record.recovery}/buffer",
        replace=replace * batch_size,
        **cfg.async_,
    )


async def reference(cfg: Any, model: str, temperature: float = 1.0) -> Service:
    """A frozen model that scores batches."""
    return await ReferenceModel.options(**cfg.placement("ref_model")).as_service(
        model, seq_len=cfg.training.seq_len, temperature=temperature, dtype=cfg.training.dtype
    )


async def if_needed(needed: bool, starting: Coroutine[Any, Any, Service]) -> Service | None:
    """What is being started, or None where this run can do without it."""
    if needed:
        return await starting
    starting.close()
    return None
