"""On-policy distillation: the student writes, and its teacher says of each token how likely it would have been to it.

    python -m apps.distill.main --config apps/distill/tiny.yaml

Sampling and training take turns. Rewards play no part in training: they say how many held-out answers are right.
"""

import asyncio

from apps.distill.config import DistillConfig
from forge import actors, start
from forge.actors import evaluate
from forge.controller import drain_metrics
from forge.data.packing import pack
from forge.losses import DistillLoss
from forge.observability import Run
from forge.recipe import launch
from forge.store import VersionStore
from forge.types import Episode, Sample


async def main(cfg: DistillConfig, model: str, held_out: list[Sample], record: Run, store: VersionStore) -> None:
    how, training = cfg.distill, cfg.training
    loss = DistillLoss(how.clip_high, entropy_coef=training.entropy_coef)
    dataset, student, trainer, teacher, reward = await asyncio.gather(
        start.dataset(cfg, model, record, in_turn=True),
        start.generator(cfg, model, store, temperature=how.temperature, max_tokens=how.max_tokens),
        start.trainer(cfg, model, record, loss, store=store, temperature=how.temperature, max_policy_age=0),
        start.reference(cfg, how.teacher, how.temperature),
        start.reward(cfg),
    )
    await actors.resume(record, trainer, dataset)

    async def written() -> list[Episode]:
        samples = await asyncio.gather(*(dataset.sample.route() for _ in range(training.batch_size)))
        prompts = sorted((sample.prompt for sample in samples), key=lambda prompt: prompt.index)
        answers = await asyncio.gather(
            *(student.generate.route(p, n=how.n_samples, seed=cfg.seed + 1_000_003 * p.index) for p in prompts)
        )
        return [Episode(completion, advantage=0.0) for completions in answers for completion in completions]

    async def publish(version: int) -> None:
        await trainer.push_weights.call(version)
        await student.update_weights.fanout(version)

    await publish(record.start)
    if record.start == 0:
        before = await evaluate(student, reward, held_out)
        record.log(0, await drain_metrics(), **before)
    for step in range(record.start + 1, training.steps + 1):
        batch = pack(await written(), **cfg.shares)
        if cfg.colocated:
            await student.release.fanout()
        batch.ref_logprobs = await teacher.logprobs.route(batch)
        metrics = await trainer.train_step.route(batch)
        await publish(step)
        last = step == training.steps
        if last or (cfg.eval.every and step % cfg.eval.every == 0):
            metrics |= await evaluate(student, reward, held_out)
        record.log(step, await drain_metrics(), **metrics)
        if cfg.checkpoint.due(step, last):
            await actors.save(record, trainer, dataset, **cfg.checkpoint.how)
    await trainer.export_model.call(record.model)


if __name__ == "__main__":
    launch(main, DistillConfig)
