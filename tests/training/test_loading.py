"""A sharded model that each rank reads its part of has the weights, bit for bit, of one that was loaded whole."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from forge.runtime.store import VersionStore
from forge.training import policy as training_policy
from forge.training.distributed import Ranks
from forge.training.loading import build_on_meta, fill_model
from forge.training.settings import SPLIT_BY_NAME, Parallelism
from tests.training import layouts
from tests.training.cases import FAMILIES, TOKENIZER, make_trainer, write_classifier, write_model
from tests.training.conftest import run
from tests.training.ranks import LORA

MODELS = {
    **{family: (family, {}) for family in FAMILIES},
    "llama untied": ("llama", {"tied": False}),
    "qwen2 untied": ("qwen2", {"tied": False}),
    "qwen3_moe untied": ("qwen3_moe", {"tied": False}),
}
HALF = {"weights_dtype": "bfloat16", "dtype": "bfloat16"}
# By name: degrees, the model, settings of the trainer.
CASES: dict[str, tuple[tuple[int, int, int, int], str, dict[str, Any]]] = {
    **{f"fsdp2 {name}": ((1, 2, 1, 1), name, {}) for name in MODELS},
    **{f"hsdp2 {name}": ((2, 1, 1, 1), name, {}) for name in ("llama", "qwen3_moe")},
    **{f"tp2 {name}": ((1, 1, 1, 2), name, {}) for name in MODELS if MODELS[name][0] in SPLIT_BY_NAME},
    "fsdp2 of adapters": ((1, 2, 1, 1), "qwen3", {"lora": LORA}),
    "tp2 of adapters": ((1, 1, 1, 2), "qwen3", {"lora": LORA}),
    **{
        f"a {head} head of {name}": ((1, 2, 1, 1), name, {"head": head})
        for head in ("value", "reward")
        for name in ("qwen3", "classifier", "gemma3")
    },
    "tp2 of a reward head": ((1, 1, 1, 2), "qwen3", {"head": "reward"}),
    "tp2 of a critic's adapters": ((1, 1, 1, 2), "qwen3", {"head": "value", "lora": LORA}),
    **{f"bfloat16 {name}": ((1, 2, 1, 1), name, HALF) for name in MODELS},
    "several files": ((1, 2, 1, 1), "several files", {}),
    "stored in bfloat16": ((1, 1, 1, 2), "stored in bfloat16", {}),
}


def state(ranks: Ranks, model: Path, **settings: Any) -> dict[str, Any]:
    """This rank's part of every parameter, the buffers and the configurations."""
    policy = make_trainer(model, ranks, **settings).policy
    local = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in policy.named_parameters()}
    generation = getattr(policy.model, "generation_config", None)
    return {
        "parameters": {name: (p.dtype, p.requires_grad, p.detach().float()) for name, p in local.items()},
        "buffers": {name: (b.dtype, b.float()) for name, b in policy.named_buffers()},
        "tied": len(local) < len(list(policy.named_parameters(remove_duplicate=False))),
        "config": json.dumps(policy.model.config.to_dict(), default=str, sort_keys=True),
        "generation": None if generation is None else generation.to_dict(),
    }


def both(ranks: Ranks, model: Path, **settings: Any) -> dict[str, Any]:
    """The state after each rank has read its part, and after each has loaded everything; on this rank as lists."""
    seen: list[bool] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append((found := build_on_meta(*args, **kwargs)) is not None)
        return found

    try:
        training_policy.build_on_meta = watched
        parts = state(ranks, model, **settings)
        training_policy.build_on_meta = lambda *args, **kwargs: None
        return {"parts": parts, "whole": state(ranks, model, **settings), "sharded first": seen}
    finally:
        training_policy.build_on_meta = build_on_meta


def scenarios(
    at: Callable[[Parallelism], Ranks], size: int, folder: Path, models: dict[str, Path], _: VersionStore
) -> dict[str, Callable[[], Any]]:
    return {
        name: partial(lambda layout, model, more: both(at(layouts.degrees(*layout)), models[model], **more), *case)
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    models = {name: write_model(folder / name, family, **more) for name, (family, more) in MODELS.items()}
    models["classifier"] = write_classifier(folder / "classifier")
    model = AutoModelForCausalLM.from_pretrained(models["llama untied"])
    model.save_pretrained(folder / "several", max_shard_size="20KB")
    assert len(list((folder / "several").glob("*.safetensors"))) > 2
    model.to(torch.bfloat16).save_pretrained(folder / "half")
    for name, place in (("several files", "several"), ("stored in bfloat16", "half")):
        TOKENIZER.save_pretrained(folder / place)
        models[name] = folder / place
    return models


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, written: dict[str, Path], processes: None) -> Any:
    store = VersionStore.create()
    yield run(2, tmp_path_factory.mktemp("loading"), written, store, scenarios)
    store.close()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_sharded_checkpoint_loading_gives_the_same_weights(loaded: Any, name: str):
    for result in loaded(name):
        assert result["sharded first"] == [True]
        parts, full = result["parts"], result["whole"]
        for kind in ("parameters", "buffers"):
            assert list(parts[kind]) == list(full[kind])
            for key, (*facts, values) in parts[kind].items():
                assert facts == list(full[kind][key][:-1]), key
                assert torch.equal(values, full[kind][key][-1]), key
        for kind in ("tied", "config", "generation"):
            assert parts[kind] == full[kind]


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def rename(folder: Path) -> None:
    write_weights(folder, {f"other.{name}": t for name, t in load_file(folder / "model.safetensors").items()})


def lose_one(folder: Path) -> None:
    write_weights(folder, dict(list(load_file(folder / "model.safetensors").items())[1:]))


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize(
    "change",
    [
        rename,
        lose_one,
        quantise,
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
    ],
    ids=["renamed", "incomplete", "quantised", "no safetensors", "adapters"],
)
def test_unusual_checkpoints_are_loaded_by_transformers(change: Callable[[Path], Any], tmp_path: Path):
    folder = write_model(tmp_path / "model", "llama")
    assert build_on_meta(AutoModelForCausalLM, folder, torch.float32) is not None
    change(folder)
    assert build_on_meta(AutoModelForCausalLM, folder, torch.float32) is None


def test_checkpoint_tensor_of_wrong_shape_raises(written: dict[str, Path], tmp_path: Path):
    folder = write_model(tmp_path / "model", "llama")
    write_weights(folder, load_file(folder / "model.safetensors") | {"model.norm.weight": torch.zeros(3)})
    model, _ = build_on_meta(AutoModelForCausalLM, folder, torch.float32) or (None, None)
    with pytest.raises(ValueError, match=r"tensor 'model.norm.weight' has shape \(3,\), but the model needs \(32,\)"):
        fill_model(model, folder, torch.device("cpu"))
