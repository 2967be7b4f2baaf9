"""Two processes train as one does: FSDP2, HSDP, idle ranks, user-written losses, checkpoints, export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.training import checkpoint
from forge.training.distributed import join_ranks
from forge.training.policy import Head
from tests.training import ranks
from tests.training.cases import example, make_trainer, targets, weights_of

TwoRanks = Callable[[str], list[Any]]
LAYOUT = {"micro_batches"}  # how the work is laid out differs with the number of ranks


def assert_same_metrics(a: dict[str, float], b: dict[str, float], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a.keys() - LAYOUT:
        assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), name


def assert_same_weights(a: dict[str, np.ndarray], b: dict[str, Any], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], np.asarray(b[name]), rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        ("fsdp", {}),
        ("hsdp", {}),
        ("hsdp accumulated", {}),
        ("untied", {}),
        ("accumulated", {}),
        ("checkpointed", {}),
        ("seed form", {"loss": ranks.SeedFormLoss(), "second": "token_mean"}),
    ],
)
def test_two_trainer_ranks_match_one_rank(two_ranks: TwoRanks, model: Path, untied: Path, scenario: str, settings: Any):
    first, second = two_ranks(scenario)
    one = ranks.five_steps(join_ranks(), untied if scenario == "untied" else model, **settings)
    for mine, other, alone in zip(first["metrics"], second["metrics"], one["metrics"], strict=True):
        assert mine == other
        assert_same_metrics(mine, alone, 1e-5)
    assert_same_weights(first["weights"], second["weights"], 0.0)
    assert_same_weights(first["weights"], one["weights"], 1e-4)
    for result in (first, second):
        np.testing.assert_allclose(result["scores"], one["scores"], atol=1e-4)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_two_trainer_ranks_match_one_rank_with_scalar_heads(
    two_ranks: TwoRanks, model: Path, tmp_path: Path, head: Head
):
    first, second = two_ranks(head)
    one = ranks.a_head(join_ranks(), model, head, tmp_path)
    for mine, other, alone in zip(first["metrics"], second["metrics"], one["metrics"], strict=True):
        assert mine == other
        assert_same_metrics(mine, alone, 1e-5)
    assert first["again"] == first["after"]
    assert_same_weights(first["weights"], second["weights"], 0.0)
    assert_same_weights(first["weights"], one["weights"], 1e-4)
    for result in (first, second):
        np.testing.assert_allclose(result["predictions"], one["predictions"], atol=1e-4)
    start = make_trainer(model, head=head)
    assert np.abs(one["predictions"] - start.predict(targets(0))).max() > 1e-2
    exported = make_trainer(first["model"], head=head)
    np.testing.assert_allclose(exported.predict(targets(0)), first["predictions"], atol=1e-5)


def test_two_trainer_ranks_match_one_rank_with_mini_batches(two_ranks: TwoRanks, model: Path):
    first, second = two_ranks("several updates")
    one = ranks.several_updates(join_ranks(), model)
    for mine, other, alone in zip(first["metrics"], second["metrics"], one["metrics"], strict=True):
        assert (mine, mine["updates"]) == (other, 4.0)
        # A maximum of each micro-batch is no mean that two ranks could share.
        mine.pop("largest"), alone.pop("largest")
        assert_same_metrics(mine, alone, 1e-5)
    assert_same_weights(first["weights"], second["weights"], 0.0)
    assert_same_weights(first["weights"], one["weights"], 1e-4)


@pytest.mark.parametrize(("scenario", "head"), [("lora", "policy"), ("lora of a critic", "value")])
def test_two_trainer_ranks_match_one_rank_with_lora(
    two_ranks: TwoRanks, model: Path, tmp_path: Path, scenario: str, head: Head
):
    first, second = two_ranks(scenario)
    one = ranks.lora(join_ranks(), model, head, tmp_path)
    for mine, other, alone in zip(first["metrics"], second["metrics"], one["metrics"], strict=True):
        assert mine == other
        assert_same_metrics(mine, alone, 1e-5)
    for result in (first, one):
        assert result["again"] == result["after"]
    for what in ("sent", "weights"):
        assert_same_weights(first[what], second[what], 0.0)
        assert_same_weights(first[what], one[what], 1e-5)
    assert_same_weights(first["weights"], first["restored"], 0.0)
    assert ("score.weight" in first["sent"]) == (head == "value")
    assert all(np.abs(values).max() > 1e-3 for values in first["sent"].values())
    exported = make_trainer(first["model"], head=head)
    assert_same_weights(first["weights"], weights_of(exported), 0.0)


def test_two_rank_training_changes_weights_beyond_tolerance(model: Path):
    one = ranks.five_steps(join_ranks(), model)
    start = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    assert all((one["weights"][name] - start[name].detach()).abs().max() > 1e-3 for name in start)


def test_non_finite_loss_raises_on_every_rank_and_keeps_weights(two_ranks: TwoRanks):
    for result in two_ranks("not finite"):
        assert result["message"].startswith("step 0: loss nan")
        assert_same_weights(result["before"], result["after"], 0.0)
        assert np.isfinite(result["next"]["loss"])


def test_two_rank_checkpoint_resumes_on_two_or_one(two_ranks: TwoRanks, model: Path):
    first, second = two_ranks("saved")
    assert first["again"] == first["after"] == second["again"]
    assert first["extra"] == second["extra"] == {"position": 7}
    trainer = make_trainer(model)
    assert checkpoint.load_checkpoint(trainer, first["path"]) == {"position": 7}
    assert trainer.step == 3
    for seed, expected in zip((3, 4), first["after"], strict=True):
        assert_same_metrics(trainer.train_step(example(seed), ranks.LOSS), expected, 1e-5)


def test_model_exported_from_two_ranks_equals_trained_weights(two_ranks: TwoRanks):
    result = two_ranks("saved")[0]
    exported = AutoModelForCausalLM.from_pretrained(result["model"])
    assert_same_weights(result["weights"], {n: p.detach() for n, p in exported.named_parameters()}, 0.0)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(result["model"]).decode([3, 4]) == "ab"


def test_single_trainer_rank_joins_no_process_group():
    ranks_ = join_ranks()
    assert (ranks_.rank, ranks_.world_size, ranks_.mesh) == (0, 1, None)
    assert torch.equal(ranks_.sum(torch.ones(2)), torch.ones(2))
