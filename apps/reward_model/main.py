"""A reward model from preferences: one number for a whole answer, higher for the one that people preferred.

    python -m apps.reward_model.main --config apps/reward_model/tiny.yaml

Leaves a sequence classifier of one class, as transformers loads it: its logit is the reward.
"""

import asyncio

from apps.reward_model.config import RewardModelConfig
from forge import actors, start
from forge.actors import evaluate_pairs
from forge.controller import drain_metrics
from forge.data.packing import pack
from forge.data.preferences import Pair
from forge.losses import BradleyTerryLoss
from forge.observability import Run
from forge.recipe import launch
from forge.store import VersionStore


async def main(cfg: RewardModelConfig, model: str, held_out: list[Pair], record: Run, store: VersionStore) -> None:
    loss = BradleyTerryLoss(**cfg.reward_model)
    dataset, trainer = await asyncio.gather(
        start.dataset(cfg, model, record, in_turn=True),
        start.trainer(cfg, model, record, loss, head="reward"),
    )
    await actors.resume(record, trainer, dataset)

    async def evaluation() -> dict[str, float]:
        if not held_out:
            return {}
        exam = pack([answer for pair in held_out for answer in pair], aggregation="sequence_mean", unit=2)
        return evaluate_pairs(loss, exam, values=await trainer.predict.route(exam))

    if record.start == 0:
        before = await evaluation()
        record.log(0, await drain_metrics(), **before)
    for step in range(record.start + 1, cfg.training.steps + 1):
        pairs = await dataset.pairs.route(cfg.training.batch_size)
        metrics = await trainer.train_step.route(pack(pairs, aggregation="sequence_mean", unit=2))
        last = step == cfg.training.steps
        if last or (cfg.eval.every and step % cfg.eval.every == 0):
            metrics |= await evaluation()
        record.log(step, await drain_metrics(), **metrics)
        if cfg.checkpoint.due(step, last):
            await actors.save(record, trainer, dataset, **cfg.checkpoint.how)
    await trainer.export_model.call(record.model)


if __name__ == "__main__":
    launch(main, RewardModelConfig)
