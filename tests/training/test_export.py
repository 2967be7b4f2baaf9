"""What is exported is what transformers would have written: names, bytes, configuration; in files of bounded size."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.system.checksums import CHECKSUMS
from forge.training import checkpoint
from forge.training.loading import write_weights
from forge.training.trainer import PolicyTrainer
from tests.training.cases import FAMILIES, example, make_trainer, write_model
from tests.training.ranks import LORA, LOSS

HALF = {"weights_dtype": "bfloat16", "dtype": "bfloat16"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{family: (family, {}, {}) for family in FAMILIES},
    **{f"{family} untied": (family, {"tied": False}, {}) for family in ("llama", "olmoe")},
    **{f"{head} head": ("qwen3", {}, {"head": head}) for head in ("value", "reward")},
    "adapters": ("qwen3", {}, {"lora": LORA}),
    "adapters of experts": ("qwen3_moe", {}, {"lora": LORA}),
    "bfloat16": ("llama", {}, HALF),
    "adapters in bfloat16": ("llama", {}, {"lora": LORA, **HALF}),
}


def by_transformers(trainer: PolicyTrainer, folder: Path) -> Path:
    """The model as `save_pretrained` writes it from all of its weights."""
    weights = {name: tensor.cpu().clone() for name, tensor in trainer.export_weights()}
    trainer.policy.model.save_pretrained(folder, state_dict=weights)
    return folder


def assert_same_model(ours: Path, theirs: Path) -> None:
    ends = (CHECKSUMS, "tokenizer.json", "tokenizer_config.json")
    assert sorted(path.name for path in ours.iterdir() if path.name not in ends) == sorted(
        path.name for path in theirs.iterdir()
    )
    for path in theirs.glob("*.json"):
        assert (ours / path.name).read_text() == path.read_text(), path.name
    mine, other = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert (mine[name].dtype, mine[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name
    with safe_open(ours / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", CASES)
def test_exported_model_files_equal_transformers_save(name: str, tmp_path: Path):
    family, of_model, settings = CASES[name]
    model = write_model(tmp_path / "from", family, **of_model)
    trainer = make_trainer(model, **settings)
    if "lora" in settings:
        trainer.train_step(example(0), LOSS)  # before it the adapters change nothing
    checkpoint.export_model(trainer, tmp_path / "ours", model)
    assert_same_model(tmp_path / "ours", by_transformers(trainer, tmp_path / "theirs"))


@pytest.mark.parametrize(("eos", "ends"), [(1, [1, 0]), ([3, 1], [3, 1, 0]), (None, [0, 1])])
def test_exported_model_stops_at_end_of_turn_token_of_chat_template(eos: Any, ends: list[int], tmp_path: Path):
    model = write_model(tmp_path / "from", "qwen3")
    trainer = make_trainer(model)
    trainer.policy.model.generation_config.eos_token_id = eos
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<pad>{% endfor %}"
    checkpoint.export_model(trainer, tmp_path / "ours", model, template)
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text())["eos_token_id"] == ends


def test_large_model_export_is_sharded_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = write_model(tmp_path / "from", "qwen3_moe")
    trainer = make_trainer(model)
    largest = 9000  # bytes; the embedding is larger, and has a file of its own
    monkeypatch.setattr(write_weights, "__defaults__", (largest,))
    checkpoint.export_model(trainer, tmp_path / "ours", model)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    found = {}
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= largest or len(tensors) == 1
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        found |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert index["metadata"]["total_parameters"] == trainer.policy.model.num_parameters()
    expected = load_file(by_transformers(trainer, tmp_path / "theirs") / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in trainer.policy.model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")("abc").input_ids


def test_model_export_holds_one_tensor_in_memory_at_a_time(tmp_path: Path):
    seen: list[weakref.ref] = []

    def value(i: int) -> torch.Tensor:
        assert not any(earlier() is not None for earlier in seen)
        tensor = torch.full((4, 3), float(i))
        seen.append(weakref.ref(tensor))
        return tensor

    named = ((f"tensor {i}", value(i)) for i in range(5))

    planned = [(f"tensor {i}", torch.empty(4, 3, device="meta")) for i in range(5)]
    write_weights(tmp_path, planned, named, largest=100)
    found = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    assert {name: float(t[0, 0]) for name, t in found.items()} == {f"tensor {i}": float(i) for i in range(5)}
