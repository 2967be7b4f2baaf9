"""A training step in one process: what it learns, what it reports, and what leaves its result unchanged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.data.packing import pack
from forge.losses import GRPOLoss, ReinforceLoss, SFTLoss, SimpleGRPOLoss
from forge.system.devices import has_bfloat16
from forge.training.distributed import join_ranks
from forge.types import Batch
from tests.training.cases import episodes, example, largest_difference, make_trainer, weights_of
from tests.training.ranks import LOSS, SeedFormLoss, five_steps


def on_policy(batch: Batch) -> Batch:
    """The batch with an unknown behaviour policy."""
    batch.logprobs = np.where(batch.mask, np.nan, 0.0).astype(np.float32)
    return batch


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 4},
        {"seq_len": 12},
        {"seq_len": 12, "gradient_accumulation_steps": 4},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_micro_batch_size_does_not_change_training_step(model: Path, settings: dict[str, Any]):
    expected, got = five_steps(join_ranks(), model), five_steps(join_ranks(), model, **settings)
    for a, b in zip(got["metrics"], expected["metrics"], strict=True):
        a.pop("micro_batches")
        assert a == pytest.approx({name: b[name] for name in a}, rel=1e-5, abs=1e-5)
    assert largest_difference(got["weights"], expected["weights"]) < 1e-4


def test_training_step_matches_transformers_and_adamw(model: Path):
    batch = example(0, [(3, 5)])
    plain = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    ids = torch.from_numpy(batch.tokens)[None]
    labels = torch.where(torch.from_numpy(batch.mask)[None], ids, -100)
    loss = plain(ids, labels=labels).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()

    trainer = make_trainer(model, learning_rate=1e-2, epsilon=1e-4)
    metrics = trainer.train_step(batch, SFTLoss())
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert largest_difference(weights_of(trainer), expected) < 1e-4


@pytest.mark.parametrize("loss", [GRPOLoss(), SimpleGRPOLoss(0.0), ReinforceLoss(0.2), SeedFormLoss()], ids=repr)
def test_policy_gradient_steps_raise_probability_of_better_answer(model: Path, loss: torch.nn.Module):
    """Two answers to the same question, one better than the other."""
    trainer = make_trainer(model, learning_rate=3e-3)
    good, bad = episodes([(3, 5), (3, 5)])
    good.advantage, bad.advantage = 1.0, -1.0
    good.logprobs = bad.logprobs = None
    batch = pack([good, bad])
    before = trainer.logprobs(batch)
    batch.ref_logprobs = before.copy()
    for _ in range(5):
        trainer.train_step(batch, loss)
    gain = (trainer.logprobs(batch) - before) * batch.mask
    assert gain[:8].sum() > 0.5
    assert gain[8:].sum() < -0.5


def test_documented_loss_mean_is_independent_of_micro_batches(model: Path):
    """Its own mean over each micro-batch, weighted: the same training however the batch is cut."""
    batches = [example(seed) for seed in range(3)]
    runs = [make_trainer(model), make_trainer(model, seq_len=12), make_trainer(model, gradient_accumulation_steps=7)]
    for batch in batches:
        losses = [trainer.train_step(batch, SeedFormLoss())["loss"] for trainer in runs]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    for trainer in runs[1:]:
        assert largest_difference(weights_of(trainer), weights_of(runs[0])) < 1e-4


def test_missing_loss_input_error_names_input(model: Path):
    def needy(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (logprobs - values).sum()

    with pytest.raises(
        ValueError, match=r"needy needs 'values', which the batch does not have; it has advantages, .*, weights"
    ):
        make_trainer(model).train_step(example(), needy)
    with pytest.raises(ValueError, match="SimpleGRPOLoss needs 'ref_logprobs'"):
        make_trainer(model).train_step(example(reference=False), SimpleGRPOLoss(0.1))


def test_train_metrics_are_means_over_trained_tokens(model: Path):
    batch = example()
    trainer = make_trainer(model, seq_len=12)
    logprobs = trainer.logprobs(batch).astype(np.float64)[batch.mask]
    metrics = trainer.train_step(batch, GRPOLoss(0.2, 0.3))
    assert batch.ref_logprobs is not None
    ratio = np.exp(logprobs - batch.logprobs[batch.mask])
    d = batch.ref_logprobs[batch.mask] - logprobs
    advantages = batch.advantages[batch.mask]
    clipped = ((ratio > 1.3) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    expected = {
        "ratio": ratio.mean(),
        "ratio_deviation": np.abs(ratio - 1).mean(),
        "ratio_max_deviation": np.abs(ratio - 1).max(),
        "kl": (np.exp(d) - d - 1).mean(),
        "clip_fraction": clipped.mean(),
        "tokens": len(batch.tokens),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 < metrics["clip_fraction"] < 1


def test_missing_behaviour_logprobs_give_importance_ratio_1(model: Path):
    trainer = make_trainer(model)
    trainer.train_step(example(), LOSS)
    metrics = trainer.train_step(on_policy(example()), LOSS)
    assert (metrics["ratio"], metrics["ratio_deviation"], metrics["ratio_max_deviation"]) == (1.0, 0.0, 0.0)


def test_trainer_logprobs_use_sampling_temperature(model: Path):
    batch = example(0, [(2, 6)])
    ids = torch.from_numpy(batch.tokens)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(ids[None]).logits[0, 1:-1]
    expected = (logits / 0.5).log_softmax(-1).gather(1, ids[2:, None])[:, 0]
    got = make_trainer(model, temperature=0.5).logprobs(batch)
    assert not got[:2].any()
    np.testing.assert_allclose(got[2:], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_loss_raises_and_keeps_weights(model: Path, value: float):
    trainer, other = make_trainer(model), make_trainer(model)
    batch = example()
    batch.advantages[np.flatnonzero(batch.mask)[3]] = value
    before = weights_of(trainer)
    with pytest.raises(FloatingPointError, match=r"step 0: .* the update was not applied"):
        trainer.train_step(batch, LOSS)
    assert largest_difference(weights_of(trainer), before) == 0.0
    assert trainer.step == 0
    # And nothing of it stays behind for the next step.
    assert trainer.train_step(example(1), LOSS) == other.train_step(example(1), LOSS)
    assert largest_difference(weights_of(trainer), weights_of(other)) == 0.0


def test_nan_values_on_context_tokens_do_not_change_training_step(model: Path):
    plain, poisoned = example(), example()
    assert poisoned.ref_logprobs is not None
    for values in (poisoned.logprobs, poisoned.advantages, poisoned.ref_logprobs):
        values[~poisoned.mask] = np.nan
    assert make_trainer(model).train_step(plain, LOSS) == make_trainer(model).train_step(poisoned, LOSS)


def test_training_step_in_bfloat16_compute_is_close_to_float32(model: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    half, full = make_trainer(model, dtype="bfloat16"), make_trainer(model)
    assert ("no bfloat16" in caplog.text) == (not has_bfloat16(torch.device("cpu")))
    for seed in range(3):
        losses = [trainer.train_step(example(seed), SFTLoss())["loss"] for trainer in (half, full)]
        assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert {tensor.dtype for tensor in weights_of(half).values()} == {torch.float32}


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_bfloat16_weights_train_and_lower_loss(model: Path, lora: dict[str, int] | None):
    settings = {"weights_dtype": "bfloat16", "dtype": "bfloat16", "lora": lora}
    trainer = make_trainer(model, learning_rate=1e-2, **settings)
    losses = [trainer.train_step(example(), SFTLoss())["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in trainer.policy.parameters()} == {torch.bfloat16}
    states = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]
    assert {value.dtype for value in states} == {torch.bfloat16}
