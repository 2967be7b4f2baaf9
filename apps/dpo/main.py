"""Direct preference optimisation: of two answers the preferred one becomes more likely than it was, against the other.

    python -m apps.dpo.main --config apps/dpo/tiny.yaml

The reference is the model that training starts from. No reward model and no sampling: pairs in, a policy out.
"""

import asyncio
from collections.abc import Sequence

from apps.dpo.config import DPOConfig
from forge import actors, start
from forge.actors import evaluate_pairs
from forge.controller import drain_metrics
from forge.data.packing import pack
from forge.data.preferences import Pair
from forge.losses import DPOLoss
from forge.observability import Run
from forge.recipe import launch
from forge.store import VersionStore
from forge.types import Batch, Episode


async def main(cfg: DPOConfig, model: str, held_out: list[Pair], record: Run, store: VersionStore) -> None:
    loss = DPOLoss(**cfg.dpo)
    dataset, trainer, reference = await asyncio.gather(
        start.dataset(cfg, model, record, in_turn=True),
        start.trainer(cfg, model, record, loss),
        start.reference(cfg, model),
    )
    await actors.resume(record, trainer, dataset)

    async def compared(pairs: Sequence[Episode]) -> Batch:
        batch = pack(pairs, aggregation="sequence_mean", unit=2)
        batch.ref_logprobs = await reference.logprobs.route(batch)
        return batch

    exam = await compared([answer for pair in held_out for answer in pair]) if held_out else None

    async def evaluation() -> dict[str, float]:
        if exam is None:
            return {}
        return evaluate_pairs(loss, exam, logprobs=await trainer.logprobs.route(exam))

    if record.start == 0:
        before = await evaluation()
        record.log(0, await drain_metrics(), **before)
    for step in range(record.start + 1, cfg.training.steps + 1):
        pairs = await dataset.pairs.route(cfg.training.batch_size)
        metrics = await trainer.train_step.route(await compared(pairs))
        last = step == cfg.training.steps
        if last or (cfg.eval.every and step % cfg.eval.every == 0):
            metrics |= await evaluation()
        record.log(step, await drain_metrics(), **metrics)
        if cfg.checkpoint.due(step, last):
            await actors.save(record, trainer, dataset, **cfg.checkpoint.how)
    await trainer.export_model.call(record.model)


if __name__ == "__main__":
    launch(main, DPOConfig)
