"""Tensor and context parallelism and their products with FSDP2 and HSDP: two and four processes train as one does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge.runtime.store import VersionStore
from forge.training import checkpoint
from forge.training.distributed import join_ranks
from tests.training import layouts, ranks
from tests.training.cases import example, make_trainer
from tests.training.conftest import Outcome
from tests.training.test_two_ranks import assert_same_metrics, assert_same_weights

pytestmark = pytest.mark.processes


def assert_as_one(results: list[Any], one: dict[str, Any], tolerance: float = 1e-4) -> None:
    """All ranks say the same, which is what one process says."""
    for result in results:
        assert result["metrics"] == results[0]["metrics"]
        assert_same_weights(result["weights"], results[0]["weights"], 0.0)
    for many, alone in zip(results[0]["metrics"], one["metrics"], strict=True):
        alone.pop("largest", None), many.pop("largest", None)  # no mean that ranks could share
        assert_same_metrics(many, alone, 1e-5)
    assert_same_weights(results[0]["weights"], one["weights"], tolerance)


@pytest.mark.full
@pytest.mark.parametrize("name", layouts.STEPS)
def test_training_in_each_sharded_layout_matches_one_process(
    request: pytest.FixtureRequest, models: dict[str, Path], name: str
):
    _, family, settings = layouts.STEPS[name]
    results = request.getfixturevalue("two_ranks" if layouts.world(name) == 2 else "four_ranks")(name)
    one = ranks.five_steps(join_ranks(), models[family], **settings)
    assert_as_one(results, one)
    for result in results:
        np.testing.assert_allclose(result["scores"], one["scores"], atol=1e-5)


@pytest.mark.full
def test_sharded_checkpoint_resumes_in_every_layout(four_ranks: Outcome, models: dict[str, Path]):
    written, onto_square, onto_other = four_ranks("saved"), four_ranks("of one rank"), four_ranks("of another layout")
    losses = [metrics["loss"] for metrics in written[0]["after"]]
    for result in written:
        assert result["again"] == result["after"]
    for result in [*onto_square, *onto_other]:
        assert result == pytest.approx(losses, rel=1e-5, abs=1e-5)
    trainer = make_trainer(models["qwen3"])
    checkpoint.load_checkpoint(trainer, written[0]["path"])
    for seed, expected in zip((3, 4), written[0]["after"], strict=True):
        assert_same_metrics(trainer.train_step(example(seed), ranks.LOSS), expected, 1e-5)


@pytest.mark.full
def test_sharded_trainer_publishes_complete_weights(four_ranks: Outcome, published: VersionStore):
    results = four_ranks("stored")
    assert [result["version"] for result in results] == [2] * 4
    assert_same_weights(results[0]["weights"], published.get("policy", version=2), 0.0)
