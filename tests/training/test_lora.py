"""Adapters: what they learn against plain transformers, what stays as it was, and what is written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from forge.losses import SFTLoss
from forge.training import checkpoint
from forge.training.settings import TARGETS
from tests.training.cases import example, largest_difference, make_trainer, regression, targets, weights_of
from tests.training.ranks import LORA, LOSS

FACTORS = (".lora_A.weight", ".lora_B.weight")


def base_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}


def test_untrained_lora_adapter_equals_base_model(untied: Path):
    trainer = make_trainer(untied, lora=LORA)
    np.testing.assert_array_equal(trainer.logprobs(example()), make_trainer(untied).logprobs(example()))
    assert largest_difference(weights_of(trainer), base_of(untied)) == 0.0
    sent = trainer.weights()
    of_layers = {f"{target}{factor}" for target in TARGETS for factor in FACTORS}
    assert {name.split(".", 4)[4] for name in sent} == of_layers
    assert len(sent) == 2 * len(of_layers)  # in both layers
    a, b = ([tensor for name, tensor in sent.items() if name.endswith(factor)] for factor in FACTORS)
    assert not any(tensor.any() for tensor in b)
    assert len({tensor.sum().item() for tensor in a}) == len(a)
    for tensor in a:  # uniform in +-1 / sqrt(in)
        assert 0.8 < tensor.abs().max() * tensor.shape[1] ** 0.5 <= 1.0


@pytest.mark.parametrize("family", ["model", "untied"])
def test_lora_training_steps_match_merged_transformers_model(family: str, request: pytest.FixtureRequest):
    """W + alpha / rank B A written out, differentiated by autograd, and AdamW over the factors only."""
    folder = request.getfixturevalue(family)
    settings = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
    trainer = make_trainer(folder, lora=settings, learning_rate=1e-2, epsilon=1e-4)
    factors = {name: tensor.clone().requires_grad_() for name, tensor in trainer.weights().items()}
    optimizer = torch.optim.AdamW(factors.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    plain, base = AutoModelForCausalLM.from_pretrained(folder), base_of(folder)

    def merged() -> dict[str, torch.Tensor]:
        modules = {name.rpartition(".lora_")[0] for name in factors}
        return base | {
            f"{m}.weight": base[f"{m}.weight"] + 2.0 * factors[f"{m}.lora_B.weight"] @ factors[f"{m}.lora_A.weight"]
            for m in modules
        }

    for seed in range(3):
        batch = example(seed, [(3, 5)])
        ids = torch.from_numpy(batch.tokens)[None]
        labels = torch.where(torch.from_numpy(batch.mask)[None], ids, -100)
        loss = functional_call(plain, merged(), (ids,), {"labels": labels}).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(factors.values(), 1.0)
        optimizer.step()
        metrics = trainer.train_step(batch, SFTLoss())
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    sent = trainer.weights()
    expected = {n: f.detach() * (2.0 if n.endswith(FACTORS[1]) else 1.0) for n, f in factors.items()}
    assert largest_difference(sent, expected) < 1e-4
    now = {name: tensor.detach() for name, tensor in merged().items()}
    assert largest_difference(weights_of(trainer), now) < 1e-4
    assert largest_difference(now, base) > 1e-2


def test_frozen_base_weights_do_not_change_in_lora_training(model: Path):
    policy, critic = (make_trainer(model, head=head, lora=LORA) for head in ("policy", "value"))
    for trainer, loss in ((policy, LOSS), (critic, regression)):
        before = {name: parameter.detach().clone() for name, parameter in trainer.policy.model.named_parameters()}
        for seed in range(3):  # a critic begins at 0, as B does: one has to move before the next can
            trainer.train_step(example(seed) if loss is LOSS else targets(seed), loss)
        named = dict(trainer.policy.model.named_parameters())
        moved = {name for name in before if not torch.equal(before[name], named[name])}
        assert moved == {name for name in before if name.endswith((*FACTORS, "score.weight"))}


@pytest.mark.parametrize("family", ["model", "untied"])
def test_lora_export_contains_merged_weights(family: str, tmp_path: Path, request: pytest.FixtureRequest):
    folder, batch = request.getfixturevalue(family), example(0, [(2, 8)])
    trainer = make_trainer(folder, lora=LORA, learning_rate=1e-2)
    for seed in range(3):
        trainer.train_step(example(seed), LOSS)
    checkpoint.export_model(trainer, tmp_path / "model", folder)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert {name for name, _ in exported.named_parameters()} == base_of(folder).keys()
    ids = torch.from_numpy(batch.tokens)
    with torch.no_grad():
        logp = exported(ids[None]).logits[0, 1:-1].log_softmax(-1).gather(1, ids[2:, None])[:, 0]
    np.testing.assert_allclose(trainer.logprobs(batch)[2:], logp, atol=1e-5)
    assert np.abs(make_trainer(folder).logprobs(batch)[2:] - logp.numpy()).max() > 1e-2


def test_lora_checkpoint_contains_only_adapter_factors(untied: Path, tmp_path: Path):
    trainer, full = make_trainer(untied, lora=LORA), make_trainer(untied)
    for seed in range(2):
        trainer.train_step(example(seed), LOSS)
    path = checkpoint.save_checkpoint(trainer, tmp_path / "lora")
    after = [trainer.train_step(example(seed), LOSS) for seed in (2, 3)]
    restored = make_trainer(untied, lora=LORA)
    checkpoint.load_checkpoint(restored, path)
    assert [restored.train_step(example(seed), LOSS) for seed in (2, 3)] == after
    assert largest_difference(restored.weights(), trainer.weights()) == 0.0
    whole = checkpoint.save_checkpoint(full, tmp_path / "full")
    sizes = [sum(file.stat().st_size for file in folder.glob("*.distcp")) for folder in (path, whole)]
    assert sizes[0] < 0.8 * sizes[1]
    for other, wrong in ((make_trainer(untied, lora=LORA), whole), (full, path)):
        with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: model\."):
            checkpoint.load_checkpoint(other, wrong)


LAYERS = r"\['down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj'\]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"targets": []}, "targets must be not empty"),
        ({"targets": ["q_proj", "lm_head", "qkv"]}, rf"no linear layers \['lm_head', 'qkv'\]; .* are {LAYERS}"),
    ],
)
def test_invalid_lora_rank_or_target_modules_raise(untied: Path, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_trainer(untied, lora=settings)
