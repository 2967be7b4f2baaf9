"""Names of the hub, model cards and uploads; the hub itself is not reached."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from forge.models.hub import check_upload, is_hub_id, split_revision, write_card


def test_model_id_revision_after_at_sign_is_parsed():
    assert split_revision("Qwen/Qwen3-0.6B@main") == ("Qwen/Qwen3-0.6B", "main")
    assert split_revision("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    assert is_hub_id("Qwen/Qwen3-0.6B@c1899de289a04d12100db370d81485cdf75e47ca")
    assert not is_hub_id("Qwen/Qwen3/0.6B")
    assert not is_hub_id("Qwen/@main")


def snapshot(cache: Path, revision: str, model_type: str) -> None:
    """A repository in the library's cache, as a download leaves it."""
    folder = cache / "models--somebody--small"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(f"{revision:0>40}")
    files = folder / "snapshots" / f"{revision:0>40}"
    files.mkdir(parents=True)
    (files / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    (files / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, files / "model.safetensors")


@pytest.mark.full
@pytest.mark.processes
def test_cached_hub_model_revisions_are_found_offline(tmp_path: Path):
    snapshot(tmp_path, "main", "t5")
    snapshot(tmp_path, "v1", "qwen3")
    code = """
from forge.models import check_family, resolve_model
check_family("somebody/small@v1")
print(resolve_model("somebody/small@v1"))
try: check_family("somebody/small")
except ValueError as error: print(error)
try: resolve_model("somebody/small@v2")
except ValueError as error: print(error)
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    v1, family, missing = found.stdout.strip().splitlines()
    assert v1.endswith(f"snapshots/{'v1':0>40}")
    assert "model_type 't5'" in family
    assert "somebody/small@v2 is not a local directory and could not be downloaded from the hub" in missing


@pytest.mark.parametrize(
    ("name", "token", "offline", "message"),
    [
        ("model", "hf_x", False, "must be owner/name"),
        ("me/model", None, False, "hf auth login"),
        ("me/model", "hf_x", True, "HF_HUB_OFFLINE is set"),
    ],
)
def test_invalid_hub_upload_settings_raise_before_run(name, token, offline, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with pytest.raises(ValueError, match=message):
        check_upload(name)


def test_model_card_names_recipe_data_and_metrics(tmp_path: Path):
    config = {
        "model": "Qwen/Qwen3-0.6B@main",
        "run": {"name": "mine"},
        "dataset": {"path": "openai/gsm8k", "sources": None},
        "training": {"steps": 5},
    }
    history = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "reward": 0.5}, {"step": 5, "eval/accuracy": 0.75}]
    write_card(tmp_path, "rl", config, history)
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.datasets) == ("Qwen/Qwen3-0.6B", ["openai/gsm8k"])
    assert "rl" in (card.data.tags or [])
    for text in ("| eval/accuracy | 0.25 (step 0) | 0.75 (step 5) |", "torch 2.13", "transformers 5", "steps: 5"):
        assert text in card.text
