"""docs/start/from_torchforge.md has its rows, each of which names its tests; and tests of rows that no block shows."""

import ast
import importlib.util
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from forge.actors import Trainer
from forge.config import ConfigError, load
from forge.losses import SimpleGRPOLoss
from forge.models import build_small_model
from forge.recipes.placement import check_hosts, gpus_needed
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller import shutdown

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("make_compatibility", ROOT / "docs/make_compatibility.py")
maker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(maker)
ROWS = [row for section in maker.sections() for row in section["rows"]]
CPU = ["--services.generator.with_gpus", "false", "--services.trainer.with_gpus", "false"]


def numbers(row: dict) -> list[int]:
    ranges = (part.split("-") for part in str(row.get("numbers", "")).split(",") if part)
    return [number for first, *last in ranges for number in range(int(first), int(*last or [first]) + 1)]


@cache
def functions_of(path: Path) -> set[str]:
    """The names of the test functions of a file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}


def test_compatibility_page_matches_compatibility_yaml():
    text = maker.PAGE.read_text()
    assert text == maker.page(text), "run python docs/make_compatibility.py"


def test_each_numbered_requirement_has_one_row_of_compatibility_yaml():
    assert sorted(number for row in ROWS for number in numbers(row)) == list(range(1, 156))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.get('numbers', '')} {row['document']}"[:40])
def test_compatibility_rows_reference_existing_tests(row):
    assert row.keys() <= {"numbers", "document", "here", "shown", "not run"}
    assert row.get("shown") or row["not run"]
    for test in row.get("shown", ()):
        path, _, name = test.partition("::")
        assert name in functions_of(ROOT / path), f"there is no {test}"


def read(name: str, *overrides: str) -> RLConfig:
    return load(RLConfig, ["--config", str(ROOT / "apps/grpo" / name), *overrides])


@pytest.mark.processes
@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine has the driver")
def test_rocm_install_script_without_amd_driver_raises():
    done = subprocess.run([ROOT / "scripts/install_rocm.sh"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"install_rocm.sh: there is no /dev/kfd: install the amdgpu driver, .*\n", done.stderr)


def test_qwen3_recipe_gpu_count_includes_reference():
    assert gpus_needed(read("qwen3_1_7b.yaml", "--grpo.beta", "0")) == {"generator": 1, "trainer": 1}
    with_reference = read("qwen3_1_7b.yaml", "--grpo.beta", "0.1", "--services.ref_model.with_gpus", "true")
    assert gpus_needed(with_reference) == {"generator": 1, "trainer": 1, "ref_model": 1}


@pytest.mark.parametrize("page", ["path: openai/gsm8k\nsplit: train\n", "n_samples: 8\nbeta: 0.1\n"])
def test_yaml_without_indentation_raises_unknown_key(tmp_path, page):
    (tmp_path / "flat.yaml").write_text(f"model: m\n{page}")
    with pytest.raises(ConfigError, match=r"^unknown key '(path|n_samples)'"):
        load(RLConfig, ["--config", str(tmp_path / "flat.yaml")])


@pytest.mark.parametrize("algorithm", ["sapo", "reinforce"])
def test_clip_settings_raise_for_algorithms_without_clipping(tmp_path, algorithm):
    path = tmp_path / "grpo_math.yaml"
    path.write_text("model: m\ndataset: {path: rows.jsonl}\ngrpo: {clip_low: 0.2, clip_high: 0.28}\n")
    words = ["--config", str(path), "--algorithm", algorithm]
    with pytest.raises(ConfigError, match=r"no setting 'clip_low': it is one of .*set grpo.clip_low to null"):
        load(RLConfig, words)
    load(RLConfig, [*words, "--grpo.clip_low", "null", "--grpo.clip_high", "null"]).load_algorithm()


def test_reference_and_reward_process_counts_are_validated():
    ranks = ["--trainer.procs", "4", "--parallelism.tensor_parallel_degree", "2", "--grpo.beta", "0.1"]
    for procs in (1, 2, 4):
        cfg = read("tiny.yaml", *CPU, *ranks, "--services.ref_model.procs", str(procs))
        assert cfg.services.ref_model.procs == procs
    with pytest.raises(ConfigError, match=r"2 \* 1 does not divide services.ref_model.procs = 3"):
        read("tiny.yaml", *CPU, *ranks, "--services.ref_model.procs", "3")
    with pytest.raises(ConfigError, match=r"services.reward.procs must be 1: scale it with num_replicas"):
        read("tiny.yaml", *CPU, "--reward.procs", "2")
    assert read("tiny.yaml", *CPU, "--reward.num_replicas", "4").services.reward.num_replicas == 4


@pytest.mark.parametrize("component", ["trainer", "generator", "reward"])
def test_component_is_placed_on_configured_host(component, monkeypatch):
    monkeypatch.setenv("FORGE_SECRET", "5" * 64)
    hosts = ["--cluster.hosts", "[node1:7070, node2:7070]"]
    cfg = read("tiny.yaml", *CPU, *hosts, f"--services.{component}.host", "node2:7070")
    assert cfg.placement(component)["host"] == "node2:7070"
    other = read("tiny.yaml", *CPU, *hosts, f"--services.{component}.host", "node3:7070")
    with pytest.raises(
        ValueError, match=rf"services.{component}.host is node3:7070, which must be one of the hosts: node1"
    ):
        check_hosts(other)


@pytest.mark.processes
async def test_shutdown_without_services_has_no_effect():
    await shutdown()


@pytest.mark.processes
@pytest.mark.full
async def test_trainer_service_accepts_batch_through_route(tmp_path):
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 64}
    model = build_small_model(tmp_path / "model", seed=0, alphabet="abc", **sizes)
    ones = torch.ones(2, 3)
    inputs = [{"tokens": torch.tensor([[3, 4, 5, 4, 1], [4, 4, 5, 5, 1]])}]
    targets = [
        {
            "response": torch.tensor([[5, 4, 1], [5, 5, 1]]),
            "ref_logprobs": -ones,
            "advantages": torch.tensor([[1.0], [-1.0]]),
            "padding_mask": ones,
        }
    ]

    trainer = await Trainer.as_actor(model, loss=SimpleGRPOLoss(beta=0.1), seq_len=64)
    with pytest.raises(TypeError, match=r"write `await trainer.train_step.route\(\.\.\.\)`"):
        trainer.train_step(inputs, targets)
    assert isinstance(await trainer.train_step.route(inputs, targets), float)
