"""torchforge's own GRPO program on this library, with three import lines of other packages replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from forge.models import build_small_model

from .run import ROOT
from .suites import TORCHFORGE

# Packages that are not installed here: TorchStore, vLLM and OmegaConf.
IMPORTS = {
    "import torchstore as ts": "import forge.store as ts",
    "from omegaconf import DictConfig": "DictConfig = dict",
    "from vllm.transformers_utils.tokenizer import get_tokenizer": (
        "from transformers import AutoTokenizer; get_tokenizer = AutoTokenizer.from_pretrained"
    ),
}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ROWS = [{"question": f"{n} + 1 =", "answer": f"#### {n + 1}"} for n in range(32)]
CARD = "---\nconfigs: [{config_name: main, data_files: [{split: train, path: train.jsonl}]}]\n---\n"
SETTINGS = ["group_size=4", "local_batch_size=8", "max_req_tokens=400", "max_res_tokens=8", "trainer.training.steps=2"]
PLACES = ("services.policy", "services.ref_model", "actors.trainer")


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.skipif(not TORCHFORGE.source, reason="no checkout of torchforge")
def test_grpo_program_of_torchforge_trains(tmp_path: Path):
    program = TORCHFORGE.text("apps/grpo/main.py")
    for line, replacement in IMPORTS.items():
        assert f"{line}\n" in program
        program = program.replace(line, replacement)
    (tmp_path / "main.py").write_text(program)
    (tmp_path / "grpo.yaml").write_text(TORCHFORGE.text("apps/grpo/qwen3_1_7b.yaml"))

    # Model and data in folders of the names that the program has for them.
    model = build_small_model(tmp_path / "Qwen/Qwen3-1.7B", max_positions=512, hidden_size=64, layers=2)
    tokenizer = AutoTokenizer.from_pretrained(model, chat_template=CHAT)
    tokenizer.save_pretrained(model)
    data = tmp_path / "openai/gsm8k"
    data.mkdir(parents=True)
    (data / "README.md").write_text(CARD)
    (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))

    words = [*SETTINGS, *(f"{place}.with_gpus=false" for place in PLACES), "~metric_logging.wandb"]
    ended = subprocess.run(
        [sys.executable, "main.py", "--config", "grpo.yaml", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "USER": "user"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Reached training limit (2 steps)" in ended.stdout
