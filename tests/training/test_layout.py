"""Degrees: what they make of a number of ranks, and which are refused. Settings that need no second process."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.recipes.prepare import check_model
from forge.recipes.schema import TrainerConfig, TrainingConfig
from forge.training import checkpoint
from forge.training.attention import repeats
from forge.training.build import build as build_model
from forge.training.distributed import RankGroup, Ranks, join, leave
from forge.training.settings import Parallelism
from forge.training.trainer import move
from tests.training.cases import example, largest_difference, make_trainer, weights_of, write_model
from tests.training.ranks import LOSS

DEGREE = st.integers(1, 6)
CPU = torch.device("cpu")


def degrees_of(*values: int | None) -> Parallelism:
    """Replicate, shard, tensor, context, experts, as far as given."""
    return Parallelism(**dict(zip(Parallelism.model_fields, values, strict=False)))  # type: ignore[arg-type]


@given(DEGREE, DEGREE, DEGREE, DEGREE, st.sampled_from(["both", "shard", "replicate"]))
def test_what_is_left_out_is_what_is_left(replicate: int, shard: int, tensor: int, context: int, given: str):
    whole = degrees_of(replicate, shard, tensor, context)
    part = degrees_of(None if given == "shard" else replicate, -1 if given == "replicate" else shard, tensor, context)
    assert part.over(replicate * shard * tensor * context) == whole


def test_by_default_all_ranks_share_the_weights():
    assert Parallelism().over(6) == degrees_of(1, 6)


@pytest.mark.parametrize(
    ("degrees", "ranks", "message"),
    [
        (Parallelism(pipeline_parallel_degree=2), 2, "pipeline_parallel_degree = 2 is not supported"),
        (Parallelism(tensor_parallel_degree=0), 2, "tensor_parallel_degree must be at least 1, got 0"),
        (degrees_of(None, -1, 2, 2), 6, r"= 2 \* 2 does not divide the trainer's 6 ranks"),
        (degrees_of(None, 3, 2), 4, "shard_degree = 3 does not divide .* tensor and context parallelism leave 2"),
        (degrees_of(None, 0), 4, "data_parallel_shard_degree = 0 does not divide the trainer's 4 ranks"),
        (degrees_of(3), 4, "data_parallel_replicate_degree = 3 does not divide the trainer's 4 ranks"),
        (Parallelism(expert_parallel_degree=0), 4, "expert_parallel_degree must be at least 1, got 0"),
        (degrees_of(2, 2, 1, 1, 4), 4, r"expert_parallel_degree = 4 does not divide .* = 2 \* 1"),
        (degrees_of(2, 4), 4, r"= 2 \* 4 does not make the trainer's 4 ranks"),
    ],
    ids=str,
)
def test_degrees_that_will_not_do(degrees: Parallelism, ranks: int, message: str):
    with pytest.raises(ValueError, match=message):
        degrees.over(ranks)


@given(st.integers(1, 16), st.integers(1, 16))
def test_ranks_get_equal_numbers_of_heads(heads: int, ranks: int):
    times = repeats(heads, ranks)
    assert heads * times % ranks == 0
    assert all(heads * fewer % ranks for fewer in range(1, times))


def test_a_model_that_cannot_be_divided(model: Path):
    four = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    Parallelism(tensor_parallel_degree=2, context_parallel_degree=2).check(SimpleNamespace(**four))
    Parallelism(context_parallel_degree=4).check(SimpleNamespace(**four))
    for degrees, message in (
        ({"tensor_parallel_degree": 4}, "num_key_value_heads = 2 is not a multiple of tensor_parallel_degree = 4"),
        ({"context_parallel_degree": 3}, r"num_attention_heads = 4 is not a multiple of .* \* .* = 3"),
    ):
        cfg = SimpleNamespace(
            trainer=TrainerConfig(), training=TrainingConfig(), parallelism=Parallelism(**degrees), engine=None
        )
        with pytest.raises(ValueError, match=message):
            check_model(cfg, str(model))
    with pytest.raises(ValueError, match="intermediate_size = 47"):
        Parallelism(tensor_parallel_degree=2).check(SimpleNamespace(**four | {"intermediate_size": 47}))
    with pytest.raises(ValueError, match="num_key_value_heads = 2"):
        build_model(model, "policy", Ranks(0, 4, CPU, None, tensor=RankGroup(0, 4)))
    for changes, message in (
        ({"model_type": "mamba"}, "mamba models are not supported; use llama, qwen2, qwen3"),
        ({"attention_bias": True}, "a bias of o_proj or down_proj is not supported"),
        ({"mlp_bias": True}, "a bias of o_proj or down_proj is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            Parallelism(tensor_parallel_degree=2).check(SimpleNamespace(**four | changes))


@pytest.mark.parametrize(
    ("degrees", "ranks", "changes", "message"),
    [
        ({"expert_parallel_degree": 2}, 2, {"model_type": "qwen3"}, "needs a mixture of experts, this is qwen3"),
        ({"expert_parallel_degree": 4}, 4, {}, "num_experts = 6 is not a multiple of expert_parallel_degree = 4"),
        ({"expert_parallel_degree": 2}, 8, {}, "6 experts cannot be divided over 8 ranks: raise data_parallel_replic"),
        ({}, 8, {}, "6 experts cannot be divided over 8 ranks: set expert_parallel_degree"),
        ({"data_parallel_replicate_degree": 2}, 8, {}, "6 experts cannot be divided over 8 ranks: set expert_paralle"),
        ({}, 6, {}, None),
        ({}, 8, {"model_type": "qwen3"}, None),
        ({"expert_parallel_degree": 2, "data_parallel_replicate_degree": 2}, 8, {}, None),
    ],
)
def test_experts_that_cannot_be_divided(
    degrees: dict[str, int], ranks: int, changes: dict[str, str], message: str | None
):
    config = SimpleNamespace(**{"model_type": "qwen3_moe", "num_experts": 6, "num_hidden_layers": 2} | changes)
    config.mlp_only_layers, config.decoder_sparse_step = [], 1
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        Parallelism(**degrees).over(ranks).check_experts(config)


def test_experts_are_divided_by_torchtitan_alone(tmp_path: Path):
    model = write_model(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match="expert_parallel_degree does nothing with"):
        make_trainer(model, Ranks(0, 2, CPU, None, experts=2))


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
def test_one_rank_with_a_mesh_trains_as_without(model: Path, tmp_path: Path, settings: dict[str, Any]):
    """What a GPU has in bfloat16: FSDP of one rank."""
    alone = make_trainer(model, **settings)
    expected = [alone.train_step(example(seed=seed), LOSS) for seed in range(3)]
    try:
        meshed = make_trainer(model, join(mesh=True), **settings)
        metrics = [meshed.train_step(example(seed=seed), LOSS) for seed in range(3)]
        for step, other in zip(metrics, expected, strict=True):
            assert step == pytest.approx(other, abs=1e-5)
        checkpoint.load(make_trainer(model, meshed.ranks, **settings), checkpoint.save(meshed, tmp_path))
        meshed.offload()
        assert meshed.train_step(example(seed=3), LOSS)["loss"] == pytest.approx(
            alone.train_step(example(seed=3), LOSS)["loss"], abs=1e-5
        )
    finally:
        leave()


def test_host_memory_is_refused_where_there_is_no_other():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(ValueError, match=r"training\.cpu_offload does nothing: this trainer computes on a CPU"):
        join(cpu_offload=True)


def test_a_device_is_given_away_and_taken_again(model: Path, tmp_path: Path):
    trainer, other = make_trainer(model), make_trainer(model)
    for each in (trainer, other):
        each.train_step(example(), LOSS)
    for use in (
        lambda: trainer.train_step(example(1), LOSS),
        lambda: trainer.logprobs(example()),
        trainer.onload,
    ):
        trainer.offload()
        trainer.offload()
        assert trainer.offloaded
        use()
        assert not trainer.offloaded
    trainer.offload()
    for use in (
        lambda: trainer.weights(),
        lambda: list(trainer.export_weights()),
        lambda: checkpoint.save(trainer, tmp_path),
        lambda: checkpoint.load(trainer, tmp_path / "step_000002"),
    ):
        use()
        assert trainer.offloaded
    other.train_step(example(1), LOSS)
    assert largest_difference(weights_of(trainer), weights_of(other)) == 0.0


def test_what_is_moved_comes_back_as_it_was(model: Path):
    """To another dtype and back, as there may be no other device."""
    moved, stayed = make_trainer(model), make_trainer(model)
    for each in (moved, stayed):
        each.train_step(example(), LOSS)
    parameters = list(moved.policy.parameters())
    move(moved.policy, moved.optimizer, torch.float64)
    assert {parameter.dtype for parameter in moved.policy.parameters()} == {torch.float64}
    assert {state["exp_avg"].dtype for state in moved.optimizer.state.values()} == {torch.float64}
    move(moved.policy, moved.optimizer, torch.float32)
    assert all(a is b for a, b in zip(parameters, moved.policy.parameters(), strict=True))
    assert moved.train_step(example(1), LOSS) == stayed.train_step(example(1), LOSS)
    assert largest_difference(weights_of(moved), weights_of(stayed)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_layers_train_alike_and_are_not_compiled_for_every_batch(model: Path, checkpointed: bool):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = make_trainer(model, compile=True, gradient_checkpointing=checkpointed)
    plain = make_trainer(model)
    graphs = []
    for seed, count in enumerate((1, 5, 12, 20, 3, 40)):
        lengths = [(int(a), int(b)) for a, b in np.random.default_rng(seed).integers(2, 9, (count, 2))]
        batch = example(seed, lengths)
        losses = [trainer.train_step(batch, LOSS)["loss"] for trainer in (compiled, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[1] == graphs[-1] < 20
    assert largest_difference(weights_of(compiled), weights_of(plain)) < 1e-4
