"""Supervised fine-tuning: cross-entropy on conversations, prompts with answers or plain text, of one or more datasets.

    python -m apps.sft.main --config apps/sft/tiny.yaml

Ends after `training.steps`, or as soon as held-out accuracy reaches `eval.stop_at`. With `from_scratch` it starts from
a small model that is made from the seed, and nothing is downloaded.
"""

import asyncio

from apps.sft.config import SFTConfig
from forge import actors, start
from forge.actors import evaluate
from forge.controller import Service, drain_metrics
from forge.data.packing import pack
from forge.data.supervised import as_samples
from forge.losses import SFTLoss
from forge.observability import Run
from forge.recipe import launch
from forge.store import VersionStore
from forge.types import Episode


async def main(cfg: SFTConfig, model: str, held_out: list[Episode], record: Run, store: VersionStore) -> None:
    aggregation = cfg.training.aggregation or "token_mean"

    async def start_exam() -> tuple[Service, Service] | None:
        if not (cfg.eval.accuracy and held_out):
            return None
        return await asyncio.gather(
            start.generator(cfg, model, store, max_tokens=cfg.eval.max_tokens), start.reward(cfg)
        )

    dataset, trainer, exam = await asyncio.gather(
        start.dataset(cfg, model, record, in_turn=True),
        start.trainer(cfg, model, record, SFTLoss(), store=store, aggregation=aggregation),
        start_exam(),
    )
    await actors.resume(record, trainer, dataset)
    samples = as_samples(held_out, model)

    async def evaluation(step: int) -> dict[str, float]:
        if not held_out:
            return {}
        batch = pack(held_out, aggregation=aggregation)
        metrics = {"eval/loss": -float((batch.weights * await trainer.logprobs.route(batch)).sum())}
        if exam is None:
            return metrics
        policy, reward = exam
        await trainer.push_weights.call(step)
        await policy.update_weights.fanout(step)
        return metrics | await evaluate(policy, reward, samples)

    def reached() -> bool:
        return record.history[-1].get("eval/accuracy", -1.0) >= cfg.eval.stop_at

    if record.start == 0:
        before = await evaluation(0)
        record.log(0, await drain_metrics(), **before)
    for step in range(record.start + 1, cfg.training.steps + 1):
        if reached():
            break
        episodes = await dataset.supervised.route(cfg.training.batch_size)
        metrics = await trainer.train_step.route(episodes)
        last = step == cfg.training.steps
        if last or (cfg.eval.every and step % cfg.eval.every == 0):
            metrics |= await evaluation(step)
        record.log(step, await drain_metrics(), **metrics)
        if cfg.checkpoint.due(step, last or reached()):
            await actors.save(record, trainer, dataset, **cfg.checkpoint.how)
    await trainer.export_model.call(record.model)


if __name__ == "__main__":
    launch(main, SFTConfig)
