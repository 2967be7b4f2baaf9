"""Value and reward heads against plain transformers: what they say, learn, and are once written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from forge.training import checkpoint
from forge.training.build import load_model
from forge.training.policy import Head, ScalarModel
from tests.training.cases import (
    largest_difference,
    make_trainer,
    regression,
    targets,
    weights_of,
    write_classifier,
)

HEADS: list[Head] = ["value", "reward"]


def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, attn_implementation="eager")


def expected(model: torch.nn.Module, head: Head, batch) -> torch.Tensor:
    """The classifier's head over the states of each sequence on its own, before the token or at it."""
    found = []
    rows = (torch.from_numpy(x).split(batch.lengths.tolist()) for x in (batch.tokens, batch.mask))
    for ids, mask in zip(*rows, strict=True):
        numbers = model.score(model.model(ids[None]).last_hidden_state)[0, :, 0]
        found.append(numbers[mask] if head == "reward" else numbers[:-1][mask[1:]])
    return torch.cat(found)


@pytest.mark.parametrize("head", HEADS)
def test_packed_scalar_head_matches_transformers(classifier: Path, head: Head):
    batch, model = targets(), plain(classifier)
    ours, theirs = ScalarModel.from_pretrained(classifier, head), expected(model, head, batch)
    torch.testing.assert_close(ours(batch).values, theirs, rtol=0, atol=1e-5)
    share = torch.linspace(-1, 1, len(theirs))
    (share @ ours(batch).values).backward()
    (share @ theirs).backward()
    own = dict(ours.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_scalar_reward_head_matches_transformers_classifier(classifier: Path):
    batch, model = targets(last=True), plain(classifier)
    rewards = make_trainer(classifier, head="reward").predict(batch)
    for ids, row in zip(*(np.split(x, np.cumsum(batch.lengths)[:-1]) for x in (batch.tokens, rewards)), strict=True):
        assert row[-1] == pytest.approx(model(torch.from_numpy(ids)[None]).logits.item(), abs=1e-5)
        assert not row[:-1].any()


@pytest.mark.parametrize("head", HEADS)
def test_missing_scalar_head_initialisation_is_independent_of_seed(
    model: Path, head: Head, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    capfd.readouterr()
    torch.manual_seed(1)
    first = make_trainer(model, head=head)
    torch.manual_seed(2)
    second = make_trainer(model, head=head)
    assert "MISSING" not in capfd.readouterr().err + caplog.text
    assert largest_difference(weights_of(first), weights_of(second)) == 0.0
    assert first.predict(targets()).any() == (head == "reward")
    backbone = {f"model.{n}": p.detach() for n, p in plain(model).model.named_parameters()}
    assert largest_difference({n: t for n, t in weights_of(first).items() if n != "score.weight"}, backbone) == 0.0


@pytest.mark.parametrize("head", HEADS)
def test_scalar_head_step_matches_transformers_and_adamw(classifier: Path, head: Head):
    batch, model = targets(), plain(classifier)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    wanted = torch.from_numpy(batch.returns[batch.mask])
    loss = torch.nn.functional.mse_loss(expected(model, head, batch), wanted)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    trainer = make_trainer(classifier, head=head, learning_rate=1e-2, epsilon=1e-4)
    metrics = trainer.train_step(batch, regression)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    moved = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert largest_difference(weights_of(trainer), moved) < 1e-4


def test_critic_loss_receives_old_values_and_returns(classifier: Path):
    batch, seen = targets(), {}
    batch.values = np.arange(len(batch.tokens), dtype=np.float32)

    def loss(values, old_values, returns, sequences, weights):
        seen.update(old=old_values.numpy(), returns=returns.numpy(), sequences=sequences.numpy())
        return (values * weights).sum()

    make_trainer(classifier, head="value").train_step(batch, loss)
    np.testing.assert_array_equal(seen["old"], batch.values[batch.mask])
    np.testing.assert_array_equal(seen["returns"], batch.returns[batch.mask])
    # In the order of the micro-batch, here the only one.
    rows = np.split(batch.mask, np.cumsum(batch.lengths)[:-1])
    np.testing.assert_array_equal(seen["sequences"], [i for i, row in enumerate(rows) for own in row if own])

    def needy(values, logprobs):
        return values.sum()

    with pytest.raises(ValueError, match=r"needy needs 'logprobs', .*; it has advantages, .*, values, weights"):
        make_trainer(classifier, head="value").train_step(batch, needy)


@pytest.mark.parametrize("head", HEADS)
def test_exported_reward_head_loads_as_classifier_with_equal_scores(model: Path, tmp_path: Path, head: Head):
    trainer, batch = make_trainer(model, head=head, learning_rate=1e-2), targets()
    for seed in range(3):
        trainer.train_step(targets(seed), regression)
    checkpoint.export_model(trainer, tmp_path / "model", model)
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert exported.config.num_labels == 1
    ours = torch.from_numpy(trainer.predict(batch)[batch.mask])
    torch.testing.assert_close(expected(exported, head, batch), ours, rtol=0, atol=1e-5)
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert exported.config.pad_token_id == words.pad_token_id
    # A batch of several rows, which transformers refuses without a padding token.
    rows = words(["abcd", "xy"], padding=True, return_tensors="pt")
    alone = [exported(**words(text, return_tensors="pt")).logits.item() for text in ("abcd", "xy")]
    assert exported(**rows).logits[:, 0].tolist() == pytest.approx(alone, abs=1e-5)
    again = make_trainer(tmp_path / "model", head=head)
    np.testing.assert_allclose(again.predict(batch)[batch.mask], ours, atol=1e-5)


def test_invalid_scalar_head_type_or_checkpoint_raises(model: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="head must be policy, value or reward, got 'critic'"):
        load_model(model, "critic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has 3 classes, but a reward model needs num_labels = 1"):
        load_model(write_classifier(tmp_path / "three", num_labels=3), "reward")
    lacking = write_classifier(tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of a value model, 'model.norm.weight' among them"):
        load_model(lacking, "value")
