"""What two ranks do in the tests, and one rank to compare them with: each scenario runs on any number of ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from forge.algorithms.base import Aggregation
from forge.losses import GRPOLoss
from forge.training import checkpoint
from forge.training.distributed import Ranks
from forge.training.policy import Head
from forge.training.trainer import PolicyTrainer
from forge.types import Batch
from tests.training.cases import example, make_trainer, regression, targets, weights_of

LOSS = GRPOLoss(0.2, 0.3, beta=0.05, entropy_coef=0.01)
ONE_SEQUENCE = [(4, 6)]
LORA = {"rank": 3, "alpha": 6.0}


class SeedFormLoss(torch.nn.Module):
    """A loss as users write it: four tensors [batch, seq], a mean over tokens of its own."""

    def forward(
        self,
        logprobs: torch.Tensor,
        ref_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        padding_mask: torch.Tensor,
    ) -> torch.Tensor:
        ratio = torch.exp(logprobs - logprobs.detach())
        masked = (-ratio * advantages + 0.1 * (ref_logprobs - logprobs) ** 2) * padding_mask
        assert masked.dim() == 2
        return masked.sum() / padding_mask.sum()


def five_steps(
    ranks: Ranks,
    model: Path,
    loss: Callable[..., torch.Tensor] = LOSS,
    second: Aggregation = "sequence_mean",
    **settings: Any,
) -> dict[str, Any]:
    """Five steps over batches that differ; the last has one sequence, which leaves a second rank without work."""
    trainer = make_trainer(model, ranks, **settings)
    batches = [example(0), example(1, aggregation=second), example(2), example(3), example(4, ONE_SEQUENCE)]
    metrics = [trainer.train_step(batch, loss) for batch in batches]
    scores = trainer.logprobs(batches[0])
    return {"metrics": metrics, "weights": weights_of(trainer), "scores": scores}


def a_head(ranks: Ranks, model: Path, head: Head, folder: Path) -> dict[str, Any]:
    """Four steps of a value or reward head with a checkpoint and an export on the way; the last has one sequence."""
    trainer = make_trainer(model, ranks, head=head)
    batches = [targets(0), targets(1, last=True), targets(2), targets(3, ONE_SEQUENCE)]
    metrics = [trainer.train_step(batch, regression) for batch in batches[:2]]
    path = checkpoint.save_checkpoint(trainer, folder / "checkpoints")
    checkpoint.export_model(trainer, folder / "model", model)
    predictions = trainer.predict(batches[0])
    after = [trainer.train_step(batch, regression) for batch in batches[2:]]
    restored = make_trainer(model, ranks, head=head)
    checkpoint.load_checkpoint(restored, path)
    again = [restored.train_step(batch, regression) for batch in batches[2:]]
    return {
        "metrics": metrics + after,
        "after": after,
        "again": again,
        "weights": weights_of(trainer),
        "predictions": predictions,
        "model": folder / "model",
    }


def lora(ranks: Ranks, model: Path, head: Head, folder: Path) -> dict[str, Any]:
    """Four steps of adapters, the last with one sequence; a checkpoint after two, and an export at the end.

    With Adam's default epsilon, gradients near 0 would show the order of their sums, which differs between instruction
    sets.
    """

    def make() -> PolicyTrainer:
        return make_trainer(
            model, ranks, head=head, lora=LORA, learning_rate=1e-2, epsilon=1e-4, gradient_checkpointing=True
        )

    loss = LOSS if head == "policy" else regression
    trainer, batches = make(), [targets(0), targets(1), targets(2), targets(3, ONE_SEQUENCE)]
    for batch in batches:
        batch.ref_logprobs = batch.logprobs
    metrics = [trainer.train_step(batch, loss) for batch in batches[:2]]
    path = checkpoint.save_checkpoint(trainer, folder / "checkpoints")
    after = [trainer.train_step(batch, loss) for batch in batches[2:]]
    restored = make()
    checkpoint.load_checkpoint(restored, path)
    again = [restored.train_step(batch, loss) for batch in batches[2:]]
    checkpoint.export_model(trainer, folder / "model", model)
    return {
        "metrics": metrics + after,
        "after": after,
        "again": again,
        "sent": {name: whole(tensor).clone() for name, tensor in trainer.weights().items()},
        "weights": weights_of(trainer),
        "restored": weights_of(restored),
        "model": folder / "model",
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Surrogate:
    """PPO's objective with metrics of its own: one number a sequence, one a token, and one that only some batches
    have."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        proximal_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        ratio = torch.exp(logprobs - proximal_logprobs)
        return -(weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).sum()

    def metrics(self, advantages: torch.Tensor, sequences: torch.Tensor) -> dict[str, torch.Tensor]:
        of_sequence = torch.stack([advantages[sequences == i].mean() for i in sequences.unique()] or [advantages.sum()])
        found = {"of_token": advantages, "of_sequence": of_sequence[: len(sequences.unique())]}
        return found | ({"largest": advantages.max()} if len(advantages) else {})


def several_updates(ranks: Ranks, model: Path) -> dict[str, Any]:
    """Steps of four updates; in the last, one rank has nothing to train in any."""
    trainer = make_trainer(model, ranks, mini_batches=2, epochs=2)
    batches = [example(0), example(1), example(2, [(3, 5), (2, 4)])]
    metrics = [trainer.train_step(batch, Surrogate()) for batch in batches]
    return {"metrics": metrics, "weights": weights_of(trainer)}


Recorded = tuple[dict[str, float], Batch, dict[str, np.ndarray]]


def recorded_step(trainer: PolicyTrainer, loss: Callable[..., torch.Tensor], aggregation: Aggregation) -> Recorded:
    """A step whose tokens are all recorded: its metrics, its batch and what was recorded. Sequences 0 and 1 begin with
    the same context, which is computed once."""
    batch = example(aggregation=aggregation)
    batch.tokens[8] = batch.tokens[0]
    batch.recorded = np.arange(len(batch.tokens))
    metrics = trainer.train_step(batch, loss)
    assert trainer.recorded is not None
    return metrics, batch, trainer.recorded


def saved(ranks: Ranks, model: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    """Three steps, a checkpoint and an export, then two steps more."""
    trainer = make_trainer(model, ranks, **settings)
    for seed in range(3):
        trainer.train_step(example(seed), LOSS)
    trainer.logprobs(example(0))
    path = checkpoint.save_checkpoint(trainer, folder / "checkpoints", extra={"position": 7})
    checkpoint.export_model(trainer, folder / "model", model)
    weights = weights_of(trainer)
    after = [trainer.train_step(example(seed), LOSS) for seed in (3, 4)]
    restored = make_trainer(model, ranks, **settings)
    extra = checkpoint.load_checkpoint(restored, path)
    again = [restored.train_step(example(seed), LOSS) for seed in (3, 4)]
    return {
        "path": path,
        "model": folder / "model",
        "weights": weights,
        "after": after,
        "again": again,
        "extra": extra,
    }


def of_one_rank(ranks: Ranks, model: Path, path: Path) -> list[float]:
    """Two ranks go on from a checkpoint of one."""
    trainer = make_trainer(model, ranks)
    checkpoint.load_checkpoint(trainer, path)
    return [trainer.train_step(example(seed), LOSS)["loss"] for seed in (3, 4)]


def not_finite(ranks: Ranks, model: Path) -> dict[str, Any]:
    """A step on a batch with one advantage that is no number, which only one rank sees."""
    trainer = make_trainer(model, ranks)
    before = weights_of(trainer)
    batch = example(0)
    batch.advantages[np.flatnonzero(batch.mask)[0]] = np.nan
    try:
        trainer.train_step(batch, LOSS)
    except FloatingPointError as error:
        message = str(error)
    after = weights_of(trainer)
    return {"message": message, "before": before, "after": after, "next": trainer.train_step(example(1), LOSS)}


def sharded(ranks: Ranks, folder: Path, model: Path, untied: Path) -> dict[str, Callable[[], Any]]:
    return {
        "fsdp": partial(five_steps, ranks, model),
        "untied": partial(five_steps, ranks, untied),
        "accumulated": partial(five_steps, ranks, model, gradient_accumulation_steps=3, seq_len=16),
        "checkpointed": partial(five_steps, ranks, model, gradient_checkpointing=True),
        "value": partial(a_head, ranks, model, "value", folder / "value"),
        "reward": partial(a_head, ranks, model, "reward", folder / "reward"),
        "lora": partial(lora, ranks, model, "policy", folder / "lora"),
        "lora of a critic": partial(lora, ranks, model, "value", folder / "lora of a critic"),
        "several updates": partial(several_updates, ranks, model),
        "seed form": partial(five_steps, ranks, model, SeedFormLoss(), "token_mean", seq_len=16),
        "saved": partial(saved, ranks, model, folder),
        "not finite": partial(not_finite, ranks, model),
    }


def plain(value: Any) -> Any:
    """Weights as numpy arrays, in dicts of any depth."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    assert value.dtype == torch.float32
    return value.numpy()
