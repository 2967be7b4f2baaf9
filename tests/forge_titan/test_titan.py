"""TorchTitan behind the trainer's interface: it trains as the default backend does, in every layout.

Needs the extra `titan`; `make test-titan` makes an environment with it.
"""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from forge.losses import SFTLoss
from forge.runtime.store import VersionStore
from forge.training import checkpoint
from forge.training.distributed import Ranks, join_ranks
from forge.training.settings import Parallelism, PassSettings
from forge.types import UNKNOWN_EXPERT
from forge_inspect.plan.components import full_batch, weighted_scores
from forge_inspect.plan.passes import run_passes
from forge_titan.setup import VERSION, check_layout, check_model
from tests.training import layouts, ranks
from tests.training.cases import example, make_trainer, tiny_model, weights_of, write_model
from tests.training.conftest import Outcome, run
from tests.training.test_sharding import assert_as_one

needs_titan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason=f"torchtitan is not installed (extra titan): make test-titan runs these with {VERSION}",
)
FAMILIES = ("qwen3", "llama", "qwen3_moe")
BY_SIZE = {
    size: [f"{name}, {family}" for name in layouts.TITAN if layouts.world(name) == size for family in FAMILIES[:2]]
    + [f"{name}, qwen3_moe" for name in layouts.EXPERTS if layouts.world(name) == size]
    for size in (2, 4)
}


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], published: VersionStore
) -> dict[int, Outcome]:
    return {
        size: run(size, tmp_path_factory.mktemp(f"titan{size}"), models, published, layouts.of_titan) for size in (2, 4)
    }


@needs_titan
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
def test_titan_on_one_process_matches_default_backend(models: dict[str, Path], family: str, settings: Any):
    theirs = ranks.five_steps(join_ranks(), models[family], backend="titan", **settings)
    assert_as_one([theirs], ranks.five_steps(join_ranks(), models[family], **settings))


@needs_titan
@pytest.mark.parametrize("name", [name for names in BY_SIZE.values() for name in names])
def test_titan_layouts_match_default_backend(outcomes: dict[int, Outcome], models: dict[str, Path], name: str):
    layout, family = name.rsplit(", ", 1)
    results = outcomes[layouts.world(layout)](name)
    steps = layouts.EXPERTS if family == "qwen3_moe" else layouts.STEPS
    one = ranks.five_steps(join_ranks(), models[family], **steps[layout][2])
    assert_as_one(results, one)
    for result in results:
        np.testing.assert_allclose(result["scores"], one["scores"], atol=1e-5)


@needs_titan
@pytest.mark.parametrize("family", FAMILIES)
def test_titan_checkpoint_resumes_and_exports_to_transformers(outcomes: dict[int, Outcome], family: str):
    results = outcomes[4](f"saved, {family}")
    for result in results:
        assert result["again"] == result["after"]
    exported = AutoModelForCausalLM.from_pretrained(results[0]["model"], dtype=torch.float32)
    found = dict(exported.named_parameters())
    assert found.keys() == results[0]["weights"].keys()
    assert exported.config.dtype == torch.float32
    for name, weight in results[0]["weights"].items():
        np.testing.assert_array_equal(found[name].detach().numpy(), np.asarray(weight), err_msg=name)
    alone = make_trainer(Path(results[0]["model"]), backend="titan")
    np.testing.assert_allclose(
        alone.logprobs(example(0)), make_trainer(Path(results[0]["model"])).logprobs(example(0)), atol=1e-5
    )


@needs_titan
def test_titan_replayed_experts_match_default_backend(models: dict[str, Path]):
    batch = example(0)
    drawn = np.random.default_rng(0).integers(0, 6, (len(batch.tokens), 2, 1))
    experts = np.concatenate([drawn, (drawn + 1) % 6], -1).astype(np.uint8)
    experts[::3] = UNKNOWN_EXPERT
    replayed = replace(batch, experts=experts)
    ours, theirs = (make_trainer(models["qwen3_moe"], backend=backend) for backend in ("fsdp", "titan"))
    expected = ours.logprobs(replayed)
    assert np.abs(expected - ours.logprobs(batch)).max() > 0.01
    np.testing.assert_allclose(theirs.logprobs(replayed), expected, atol=1e-5)


@needs_titan
def test_titan_export_keeps_generation_config(models: dict[str, Path], tmp_path: Path):
    start = tmp_path / "start"
    shutil.copytree(models["qwen3"], start)
    GenerationConfig(eos_token_id=[1, 2], temperature=0.5, do_sample=True).save_pretrained(start)
    checkpoint.export_model(make_trainer(start, backend="titan"), tmp_path / "model", start)
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [1, 2]


@needs_titan
def test_titan_scaled_rotary_matches_transformers(tmp_path: Path):
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    tiny_model("llama", tied=False, rope_parameters=scaled).save_pretrained(tmp_path)
    ours, theirs = (make_trainer(tmp_path, backend=backend) for backend in ("fsdp", "titan"))
    assert_same = np.testing.assert_allclose
    assert_same(theirs.logprobs(example(0)), ours.logprobs(example(0)), atol=1e-5)
    assert weights_of(theirs).keys() == weights_of(ours).keys()


@needs_titan
@pytest.mark.parametrize("settings", [{"head": "value"}, {"lora": {"rank": 2, "alpha": 4.0}}], ids=["head", "lora"])
def test_unsupported_titan_settings_raise(models: dict[str, Path], settings: dict[str, Any]):
    with pytest.raises(ValueError, match="use fsdp"):
        make_trainer(models["qwen3"], backend="titan", **settings)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Qwen2Config(), "model_type 'qwen2'"),
        (Gemma3TextConfig(), "model_type 'gemma3_text'"),
        (LlamaConfig(attention_bias=True), "biases"),
        (Qwen3Config(use_sliding_window=True, max_window_layers=0, sliding_window=8), "sliding-window"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act 'gelu'"),
    ],
    ids=["family", "without hidden_act", "biases", "windows", "activation"],
)
def test_unsupported_titan_model_raises(config: Any, says: str):
    with pytest.raises(ValueError, match=says):
        check_model(config)


class Descent(torch.optim.SGD):
    """Weights minus rate times gradient: what it changes is the gradient."""

    def __init__(self, groups: Any, lr: float, **_: Any) -> None:
        super().__init__(groups, lr)


GRADIENTS = {"optimizer": "tests.forge_titan.test_titan:Descent", "max_grad_norm": 0.1, "learning_rate": 1.0}
PARTS = {"seq_len": 16, "gradient_checkpointing": True}
# By name: ranks, pipeline, tensor, stages of a rank (the ranks that are left shard); the model, settings.
PIPELINES: dict[str, tuple[tuple[int, int, int, int], str, dict[str, Any]]] = {
    "pp2": ((2, 2, 1, 1), "llama", {}),
    "pp2 with several updates": ((2, 2, 1, 1), "qwen3", {"mini_batches": 2, "epochs": 2}),
    "pp2 with two stages, supervised": ((2, 2, 1, 2), "llama", {"loss": SFTLoss(), **PARTS}),
    "pp2 fsdp2": ((4, 2, 1, 1), "llama", {}),
    "pp2 fsdp2, supervised": ((4, 2, 1, 1), "qwen3", {"loss": SFTLoss()}),
    "pp2 fsdp2 with two stages": ((4, 2, 1, 2), "qwen3", PARTS),
    "pp2 tp2": ((4, 2, 2, 1), "llama", {}),
    "pp2 tp2 with two stages": ((4, 2, 2, 2), "qwen3", GRADIENTS),
    "pp4": ((4, 4, 1, 1), "llama", GRADIENTS),
}


def in_stages(pipeline: int, tensor: int = 1, stages: int = 1) -> Parallelism:
    return Parallelism(
        pipeline_parallel_degree=pipeline,
        pipeline_parallel_schedule="1F1B" if stages == 1 else "Interleaved1F1B",
        tensor_parallel_degree=tensor,
    )


def saved_in_stages(at: Ranks, other: Ranks, model: Path, folder: Path, store: VersionStore) -> dict[str, Any]:
    """What is saved, goes on without a pipeline and is published; and the message of a loss that fails."""
    outcome = ranks.saved(at, model, folder, backend="titan")
    trainer, whole = (make_trainer(model, each, backend="titan") for each in (at, other))
    for each in (trainer, whole):
        checkpoint.load_checkpoint(each, outcome["path"])
    with pytest.raises(ValueError, match=r"needs 'missing', .*; it has advantages"):
        trainer.train_step(example(3), lambda logprobs, missing: logprobs.sum())
    trainer.logprobs(example(0))
    version = store.put(str(folder), trainer.weights(), 3)
    published = store.get(str(folder), version=version)
    return outcome | {"whole": [whole.train_step(example(i), ranks.LOSS) for i in (3, 4)], "published": published}


def of_pipelines(
    at: Callable[[Parallelism], Ranks], size: int, folder: Path, models: dict[str, Path], store: VersionStore
) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        name: partial(
            lambda degrees, model, more: ranks.five_steps(at(in_stages(*degrees)), model, backend="titan", **more),
            *(degrees, models[family], settings),
        )
        for name, ((number, *degrees), family, settings) in PIPELINES.items()
        if number == size
    }
    two = in_stages(2, 1, 4 // size)
    return found | {"saved": lambda: saved_in_stages(at(two), at(Parallelism()), models["llama"], folder, store)}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_model(tmp_path_factory.mktemp(family), family, tied=False, num_hidden_layers=4)
        for family in FAMILIES[:2]
    }


@pytest.fixture(scope="module")
def pipelines(
    tmp_path_factory: pytest.TempPathFactory, deep: dict[str, Path], published: VersionStore
) -> dict[int, Outcome]:
    return {size: run(size, tmp_path_factory.mktemp("stages"), deep, published, of_pipelines) for size in (2, 4)}


@needs_titan
@pytest.mark.parametrize("name", PIPELINES)
def test_titan_pipeline_trains_like_one_process(pipelines: dict[int, Outcome], deep: dict[str, Path], name: str):
    (size, *_), family, settings = PIPELINES[name]
    results = pipelines[size](name)
    one = ranks.five_steps(join_ranks(), deep[family], backend="titan", **settings)
    assert_as_one(results, one, 2e-5)
    for result in results:
        np.testing.assert_allclose(result["scores"], one["scores"], rtol=1e-5, atol=1e-6)


@needs_titan
@pytest.mark.parametrize("size", [2, 4])
def test_titan_pipeline_resumes_exactly_and_publishes_all_stages(pipelines: dict[int, Outcome], size: int):
    for result in pipelines[size]("saved"):
        assert result["again"] == result["after"]
        for ours, theirs in zip(result["whole"], result["after"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-5)
        exported = weights_of(make_trainer(Path(result["model"]), backend="titan"))
        for weights in (result["weights"], result["published"]):
            assert exported.keys() == weights.keys()
            for name, weight in exported.items():
                np.testing.assert_array_equal(weight, weights[name], err_msg=name)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LlamaConfig(tie_word_embeddings=True), "embedding and head of this model are one matrix"),
        (Qwen3MoeConfig(), "mixtures of experts have none"),
        (LlamaConfig(num_hidden_layers=3), "the model's 3 layers are too few for 4 stages"),
    ],
    ids=["tied", "mixture", "layers"],
)
def test_titan_pipeline_of_model_without_stages_raises(config: Any, says: str):
    with pytest.raises(ValueError, match=f"pipeline_parallel_degree = 2: {says}"):
        check_layout(in_stages(2, 1, 2).over(2), config)


def test_memory_plan_of_titan_pipeline_divides_layers(deep: dict[str, Path]):
    def count_weights(ranks: int) -> int:
        settings = {"parallelism": in_stages(ranks), "world_size": ranks, "backend": "titan"}
        return run_passes(deep["llama"], full_batch(64, 8, 1), weighted_scores, PassSettings(), **settings).elements

    # Embedding or head, and two of four layers.
    assert count_weights(1) / 2 == pytest.approx(count_weights(2), rel=0.02)
