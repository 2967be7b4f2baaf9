"""Degrees: what they make of a number of ranks, and which are refused. Settings that need no second process."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forge.recipes.prepare import check_model
from forge.recipes.schema import TrainerConfig, TrainingConfig
from forge.training import checkpoint
from forge.training.build import build_policy as build_model
from forge.training.distributed import RankGroup, Ranks
from forge.training.settings import Parallelism
from forge_titan.setup import check_layout
from tests.training.cases import example, largest_difference, make_trainer, weights_of, write_model
from tests.training.ranks import LOSS

CPU = torch.device("cpu")


def degrees_of(*values: int | None) -> Parallelism:
    """Replicate, shard, tensor, context, experts, as far as given."""
    return Parallelism(**dict(zip(Parallelism.model_fields, values, strict=False)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("degrees", "ranks", "message"),
    [
        (Parallelism(pipeline_parallel_degree=2), 3, r"= 2 \* 1 \* 1 does not divide the trainer's 3 ranks"),
        (Parallelism(pipeline_parallel_degree=0), 2, "pipeline_parallel_degree must be at least 1, got 0"),
        (Parallelism(tensor_parallel_degree=0), 2, "tensor_parallel_degree must be at least 1, got 0"),
        (degrees_of(None, -1, 2, 2), 6, r"= 1 \* 2 \* 2 does not divide the trainer's 6 ranks"),
        (degrees_of(None, 3, 2), 4, "shard_degree = 3 does not divide .* the other degrees leave 2"),
        (degrees_of(None, 0), 4, "data_parallel_shard_degree = 0 does not divide the trainer's 4 ranks"),
        (degrees_of(3), 4, "data_parallel_replicate_degree = 3 does not divide the trainer's 4 ranks"),
        (Parallelism(expert_parallel_degree=0), 4, "expert_parallel_degree must be at least 1, got 0"),
        (degrees_of(2, 2, 1, 1, 4), 4, r"expert_parallel_degree = 4 does not divide .* = 2 \* 1"),
        (degrees_of(2, 4), 4, r"= 2 \* 4 does not make the trainer's 4 ranks"),
    ],
    ids=str,
)
def test_invalid_parallelism_degrees_raise(degrees: Parallelism, ranks: int, message: str):
    with pytest.raises(ValueError, match=message):
        degrees.over(ranks)


def test_model_dimensions_indivisible_by_parallel_degree_raise(model: Path):
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
def test_experts_indivisible_by_parallel_degree_raise(
    degrees: dict[str, int], ranks: int, changes: dict[str, str], message: str | None
):
    config = SimpleNamespace(**{"model_type": "qwen3_moe", "num_experts": 6, "num_hidden_layers": 2} | changes)
    config.mlp_only_layers, config.decoder_sparse_step = [], 1
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_layout(Parallelism(**degrees).over(ranks), config)


def test_expert_and_pipeline_parallelism_need_titan_backend(tmp_path: Path):
    model = write_model(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match="expert_parallel_degree needs"):
        make_trainer(model, Ranks(0, 2, CPU, None, experts=2))
    with pytest.raises(ValueError, match="pipeline_parallel_degree above 1 needs trainer"):
        make_trainer(model, Ranks(0, 2, CPU, None, stages=2))


def test_trainer_offloaded_between_steps_trains_identically(model: Path, tmp_path: Path):
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
        lambda: checkpoint.save_checkpoint(trainer, tmp_path),
        lambda: checkpoint.load_checkpoint(trainer, tmp_path / "step_000002"),
    ):
        use()
        assert trainer.offloaded
    other.train_step(example(1), LOSS)
    assert largest_difference(weights_of(trainer), weights_of(other)) == 0.0
