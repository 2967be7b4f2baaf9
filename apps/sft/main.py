"""Supervised fine-tuning: cross-entropy on the dataset's answers.

    python -m apps.sft.main --config apps/sft/tiny.yaml

Ends after `training.steps`, or as soon as held-out accuracy reaches `eval.stop_at`. With `from_scratch` it starts from
a small model that is made from the seed, and nothing is downloaded.
"""

import asyncio

from apps.sft.config import SFTConfig
from forge import actors
from forge.actors import DatasetActor, Generator, RewardActor, Trainer, evaluate
from forge.controller import drain_metrics
from forge.losses import SFTLoss
from forge.observability import Run
from forge.recipe import launch
from forge.store import VersionStore
from forge.types import Sample


async def main(cfg: SFTConfig, model: str, held_out: list[Sample], record: Run, store: VersionStore) -> None:
    services = cfg.services
    dataset, policy, trainer, reward = await asyncio.gather(
        DatasetActor.options(**services.dataset).as_actor(
            model, seed=cfg.seed, journal=f"{record.recovery}/dataset", **cfg.dataset
        ),
        Generator.options(**services.generator).as_service(
            model, store=store, max_tokens=cfg.eval.max_tokens, **cfg.generator
        ),
        Trainer.options(**services.trainer).as_actor(
            model,
            loss=SFTLoss(),
            store=store,
            optimizer=cfg.training.optimizer(),
            aggregation=cfg.training.aggregation,
            shard_degree=cfg.parallelism.data_parallel_shard_degree,
            recovery=record.checkpoints if cfg.checkpoint.every else None,
            **cfg.training.trainer(),
        ),
        RewardActor.options(**services.reward).as_service(**cfg.reward),
    )
    await actors.resume(record, trainer, dataset)

    async def accuracy(step: int) -> dict[str, float]:
        await trainer.push_weights.call(step)
        await policy.update_weights.fanout(step)
        return await evaluate(policy, reward, held_out)

    def reached() -> bool:
        return record.history[-1].get("eval/accuracy", -1.0) >= cfg.eval.stop_at

    if record.start == 0:
        before = await accuracy(0)
        record.log(0, await drain_metrics(), **before)
    for step in range(record.start + 1, cfg.training.steps + 1):
        if reached():
            break
        episodes = await dataset.supervised.route(cfg.training.batch_size)
        metrics = await trainer.train_step.route(episodes)
        last = step == cfg.training.steps
        if last or (cfg.eval.every and step % cfg.eval.every == 0):
            metrics |= await accuracy(step)
        record.log(step, await drain_metrics(), **metrics)
        if cfg.checkpoint.due(step, last or reached()):
            await actors.save(record, trainer, dataset, **cfg.checkpoint.how)
    await trainer.export_model.call(record.model)


if __name__ == "__main__":
    launch(main, SFTConfig)
