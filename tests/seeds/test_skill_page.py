"""The skill page: rewards, losses, batches, configurations and commands."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from forge.algorithms import load_algorithm
from forge.config import ConfigError, load
from forge.losses import ReinforceLoss
from forge.models import build_small_model
from forge.recipes.rl_config import RLConfig
from forge.recipes.sft import SFTConfig
from tests.seeds import printed

pytestmark = pytest.mark.skipif(printed.MISSING, reason="the documents are not alongside the checkout")
ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1}
CPU = [argument for name in ("generator", "trainer") for argument in (f"--services.{name}.with_gpus", "false")]


def section(start: str, end: str) -> str:
    """The YAML between these lines."""
    return printed.yaml(printed.block(printed.SKILL, start, end)[:-1])


def math_config(tmp_path: Path) -> Path:
    path = tmp_path / "grpo_math.yaml"
    path.write_text(section("# config/grpo_math.yaml", "Step 2: Define Reward"))
    return path


def read(path: Path, *overrides: str) -> RLConfig:
    return load(RLConfig, ["--config", str(path), *overrides])


def test_skill_page_math_config_loads_with_documented_values(tmp_path):
    cfg = read(math_config(tmp_path))
    text = yaml.safe_load((tmp_path / "grpo_math.yaml").read_text())
    for section, keys in text.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            if section not in ("services", "grpo"):
                found = getattr(getattr(cfg, section), key)
                assert found == type(found)(value), (section, key)  # YAML reads 1e-6 as text
    algorithm = cfg.load_algorithm()
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.beta) == (0.2, 0.28, 0.1)
    assert cfg.starts_reference(algorithm)


@pytest.mark.processes
@pytest.mark.full
def test_config_of_math_skill_document_trains(tmp_path):
    """With a small model and data in folders that are called as those of the hub."""
    path = math_config(tmp_path)
    build_small_model(tmp_path / "Qwen/Qwen2.5-7B-Instruct", seed=0, alphabet=None, max_positions=4096, **SIZES)
    data = tmp_path / "openai/gsm8k"
    data.mkdir(parents=True)
    rows = "".join(json.dumps({"question": f"{n}+1?", "answer": f"It is\n#### {n + 1}"}) + "\n" for n in range(20))
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text(rows)
    small = ["--training.steps", "1", "--grpo.max_tokens", "8", "--eval.problems", "2", "--training.batch_size", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "apps.grpo.main", "--config", str(path), *CPU, *small, "--ref_model.with_gpus", "false"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TORCHSTORE_USE_RDMA": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout + done.stderr
    assert "looks like a whole solution" in output
    row = json.loads((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()[-1])
    assert {"train/entropy", "train/kl", "reward"} <= row.keys()


def test_skill_page_distributed_config_gives_documented_layout(tmp_path):
    path = tmp_path / "distributed.yaml"
    path.write_text(section("# config/distributed.yaml", "Launch with SLURM") + "dataset: {path: openai/gsm8k}\n")
    (launch,) = re.findall(r"--trainer.procs \d+ \\\n?|--trainer.procs \d+", "\n".join(printed.document(printed.SKILL)))
    assert launch.startswith("--trainer.procs 4")
    overrides = ["--trainer.procs", "4", "--generator.procs", "4"]
    with pytest.raises(ConfigError, match=r"services.generator.procs = 4 splits one model over 4 processes .* vllm"):
        read(path, *overrides)
    cfg = read(path, "--trainer.procs", "4", "--generator.procs", "1")
    layout = cfg.parallelism.over(4)
    assert (layout.tensor_parallel_degree, layout.data_parallel_shard_degree) == (2, 2)
    if importlib.util.find_spec("vllm") is not None:
        assert read(path, *overrides, "--generator.engine", "vllm").generator.over(4).vllm == {
            "tensor_parallel_size": 4
        }
    with pytest.raises(
        ConfigError, match=r"data_parallel_shard_degree = 2 does not divide services\.trainer\.procs = 2"
    ):
        read(path, "--generator.procs", "1")  # as printed: 2 x 2 ranks over two processes


@pytest.mark.parametrize(
    ("first", "last", "key"),
    [
        ("n_samples: 4", "n_samples: 4", "grpo"),
        ("seq_len: 2048", "seq_len: 2048", "training"),
        ("sync_interval: 10", "sync_interval: 10", "training"),
        ("beta: 0.2 ", "beta: 0.2 ", "grpo"),
        ("entropy_coef: 0.01", "entropy_coef: 0.01", "training"),
    ],
)
def test_skill_page_troubleshooting_settings_are_valid(tmp_path, first, last, key):
    (line,) = printed.block(printed.SKILL, first, last)
    name, value = line.split("#")[0].split(":")
    cfg = read(math_config(tmp_path), f"--{key}.{name.strip()}", value.strip())
    section = getattr(cfg, key)
    assert getattr(section, name.strip(), (section.model_extra or {}).get(name.strip())) == float(value)


def test_skill_page_config_runs_without_reference_model(tmp_path):
    lines = printed.block(printed.SKILL, "# Remove ref_model", "# Remove ref_model")
    assert "generator weights" in lines[0]
    cfg = read(math_config(tmp_path), "--services.ref_model", "null")
    assert cfg.load_algorithm().needs_reference
    assert not cfg.starts_reference(cfg.load_algorithm())
    on_cpu = printed.yaml(["services:", *printed.block(printed.SKILL, "Or use CPU for", "with_gpus: false")[1:]])
    assert on_cpu.split() == ["services:", "ref_model:", "with_gpus:", "false"]
    assert not read(math_config(tmp_path), "--ref_model.with_gpus", "false").services.ref_model.with_gpus


def test_skill_page_custom_reward_scores_answers():
    names = printed.run(printed.python(printed.block(printed.SKILL, "# rewards.py", "1.0 if answer == target")))
    reward = names["CustomMathReward"]()
    assert [reward("", r"\boxed{7}", "7"), reward("", r"\boxed{8}", "7"), reward("", "7", "7")] == [1.0, 0.0, 0.0]
    assert names["MathReward"]()("", r"\boxed{7}", "7") == 1.0
    assert callable(names["ThinkingReward"]())


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = {n: torch.randn(2, 5, generator=generator) for n in ("logprobs", "ref_logprobs", "advantages")}
    return {**draw, "padding_mask": torch.tensor([[1.0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])}


def test_skill_page_custom_loss_loads_as_algorithm(tmp_path, monkeypatch):
    code = printed.python(printed.block(printed.SKILL, "# src/forge/losses/custom_loss.py", "return loss"))
    module = tmp_path / "custom_loss.py"
    module.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    from custom_loss import CustomLoss

    use = printed.block(printed.SKILL, "loss_fn = CustomLoss", "padding_mask=padding_mask,")
    given = tensors()
    names = printed.run("\n".join([*use, ")"]), CustomLoss=CustomLoss, **given)
    ratio = (given["logprobs"] - given["ref_logprobs"]).exp()
    clipped = torch.minimum(ratio * given["advantages"], ratio.clamp(0.8, 1.2) * given["advantages"])
    kl = given["ref_logprobs"] - given["logprobs"]
    mask = given["padding_mask"]
    assert names["loss"].item() == pytest.approx((((0.1 * kl - clipped) * mask).sum() / mask.sum()).item())
    monkeypatch.delitem(sys.modules, "custom_loss")

    loss = load_algorithm("custom_loss:CustomLoss", clip_range=0.3, beta=0.2)
    assert isinstance(loss.function, nn.Module)
    assert (loss.function.clip_range, loss.beta, loss.needs_reference) == (0.3, 0.2, True)
    config = math_config(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown key 'grpo.clip_low'; known here: clip_range, beta"):
        read(config, "--algorithm", "custom_loss:CustomLoss")
    no_clips = ["--grpo.clip_low", "null", "--grpo.clip_high", "null", "--grpo.clip_range", "0.2"]
    assert read(config, "--algorithm", "custom_loss:CustomLoss", *no_clips).load_algorithm().function.clip_range == 0.2


def test_skill_page_built_in_losses_return_finite_values():
    code = "\n".join(
        printed.block(printed.SKILL, "from forge.losses import SimpleGRPOLoss", "padding_mask=padding_mask")
    )
    names = printed.run(code + "\n)", **tensors())
    assert names["loss"].isfinite()
    assert names["ReinforceLoss"] is ReinforceLoss
    lines = printed.block(printed.SKILL, "from forge.losses.reinforce_loss", "ReinforceLoss(clip_ratio=0.2)")
    names = printed.run("\n".join(lines))
    assert names["loss_fn"].clip_ratio == 0.2
    (line,) = printed.block(printed.SKILL, "- Loss functions: ", "built-in")
    for name in re.findall(r"\b[A-Z]{4}\b", line):
        assert load_algorithm(name.lower()) is not None


def test_skill_page_batch_format_is_accepted_by_training_step(tmp_path):
    """The keys of the printed dicts, with tensors for the types; the trainer is in this process."""
    from forge.actors import Trainer
    from forge.losses import SimpleGRPOLoss

    lines = printed.block(printed.SKILL, "inputs = [{", "loss = trainer.train_step")
    keys = re.findall(r'"(\w+)": torch.Tensor', "\n".join(lines))
    assert keys == ["tokens", "response", "ref_logprobs", "advantages", "padding_mask"]
    model = build_small_model(tmp_path / "model", seed=0, alphabet="abc", max_positions=64, **SIZES)
    trainer = Trainer(model, loss=SimpleGRPOLoss(beta=0.1), optimizer={"learning_rate": 1e-2}, seq_len=64)
    trainer.setup()
    try:
        response = torch.tensor([[4, 5, 4, 3, 1], [5, 5, 1, 0, 0]])
        tensor = {
            **tensors(),
            "tokens": torch.cat([torch.tensor([[3, 4], [4, 4]]), response], 1),
            "response": response,
            "advantages": torch.tensor([[1.0], [-1.0]]),
        }
        code = "\n".join(lines)
        code = re.sub(r'"(\w+)": torch.Tensor', lambda match: f'"{match[1]}": tensor["{match[1]}"]', code)
        before = {name: weight.clone() for name, weight in trainer.trainer.weights().items()}
        assert isinstance(printed.run(code, trainer=trainer, tensor=tensor)["loss"], float)
        assert any((weight != before[name]).any() for name, weight in trainer.trainer.weights().items())
    finally:
        trainer.teardown()


def test_skill_page_completion_fields_exist():
    import forge

    fields = re.findall(
        r"^(\w+): \S+", "\n".join(printed.block(printed.SKILL, "class Completion:", "metadata: dict")), re.M
    )
    assert fields == ["text", "token_ids", "logprobs", "metadata"]
    completion = forge.Completion("a", [1, 2], [-0.1, -0.2], {"source": "test"})
    assert [getattr(completion, name) for name in fields] == ["a", [1, 2], [-0.1, -0.2], {"source": "test"}]
    assert forge.Group([forge.Episode(completion, 1.0)]).rewards == [1.0]


@pytest.mark.processes
def test_skill_page_commands_and_files_exist(tmp_path):
    text = "\n".join(printed.document(printed.SKILL))
    commands = set(re.findall(r"python -m (apps\.\w+\.main) --config (apps/\S+?\.yaml)", text))
    assert commands >= {("apps.sft.main", "apps/sft/llama3_8b.yaml"), ("apps.grpo.main", "apps/grpo/qwen3_1_7b.yaml")}
    for module, config in commands:
        assert importlib.util.find_spec(module) is not None
        load({"apps.sft.main": SFTConfig, "apps.grpo.main": RLConfig}[module], ["--config", str(ROOT / config)])
    for script in set(re.findall(r"\./(scripts/\w+\.sh)", text)):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
        assert os.access(ROOT / script, os.X_OK)
        done = subprocess.run([ROOT / script, "--nothing"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "unknown option --nothing" in done.stderr
    (check,) = set(re.findall(r'python -c "(import torch, forge, vllm; .*?)"', text))
    if importlib.util.find_spec("vllm") is None:
        check = check.replace(", vllm", "")
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "OK"
