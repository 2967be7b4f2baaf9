"""The recipes end to end, as a user starts them: real processes, small models, a few steps."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.config import Arguments
from forge.models import build_small_model
from forge.recipes.launch import launch
from forge.recipes.placement import check_gpus, gpus_needed
from forge.recipes.prepare import prepare_run
from forge.recipes.result import Result
from forge.recipes.resume import Start, read_config
from forge.recipes.rl_config import RLConfig as GRPOConfig
from tests.trees import descendants

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"

CONFIG = {
    "from_scratch": {"alphabet": "abcdefghijklmnopqrstuvwxyz>", "hidden_size": 32, "layers": 2, "heads": 2},
    "dataset": {"task": "apps.toys.words:Reverse", "difficulty": [2, 4], "prompt_template": "{question}>"},
    "training": {"batch_size": 4, "steps": 3, "learning_rate": 1e-3, "seq_len": 256},
    "grpo": {"n_samples": 4, "max_tokens": 8},
    "reward": {"functions": ["CharacterMatch"], "accuracy": "ExactMatch"},
    "generator": {"slots": 16},
    "services": {"generator": {"num_replicas": 2}},
    "checkpoint": {"every": 1, "keep": 2},
    "eval": {"problems": 8, "every": 2},
}


def command(folder: Path, *overrides: str, recipe: str = "grpo", config: dict = CONFIG) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config | {"run": {"name": "test", "root": str(folder / "runs"), "overwrite": True}}))
    return [sys.executable, "-m", f"apps.{recipe}.main", "--config", str(path), *overrides]


def start(*args: str, group: bool = False) -> subprocess.Popen:
    return subprocess.Popen(
        args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=group
    )


def finish(*args: str) -> tuple[int, str]:
    process = start(*args)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def run_here(*args: str) -> None:
    """Run the same command in this process, whose fork server has imported what its components need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(args[2:]))
        runpy.run_module(args[2], run_name="__main__")


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs/test/metrics.jsonl").read_text().splitlines()]


@pytest.mark.processes
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            [
                *("--async.max_policy_age", "0", "--grpo.beta", "0.1", "--services.ref_model", "{procs: 2}"),
                *("--trainer.procs", "2", "--trainer.hosts", "2"),
            ],
            id="lock-step",
        ),
        pytest.param(
            ["--training.sync_interval", "3", "--eval.every", "3"],
            id="asynchronous",
            marks=pytest.mark.full,
        ),
    ],
)
def test_grpo_runs_record_all_metrics_and_export(tmp_path, overrides):
    whole = ["--metrics.rollouts", str(CONFIG["training"]["batch_size"])]
    code, output = finish(*command(tmp_path, *overrides, *whole, "--metrics.tensorboard", "true"))
    assert code == 0, output
    folder = tmp_path / "runs/test"
    history = rows(tmp_path)
    assert [row["step"] for row in history] == [0, 1, 2, 3]
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/clip_fraction", "train/ratio", "policy_age"):
        assert all(name in row for row in history[1:]), name
    for name in (
        "reward",
        "reward/std",
        "accuracy",
        "groups_without_signal",
        "generation/completion_length",
        "generation/truncated",
        "generation/tokens_per_second",
        "train/tokens_per_second",
        "seconds/train",
        "seconds/update_weights",
        "eval/accuracy",
    ):
        assert any(name in row for row in history), name
    if "0.1" in overrides:
        assert all(row["policy_age"] == 0 for row in history[1:])
        assert max(row["train/ratio_max_deviation"] for row in history[1:]) < 1e-4
        assert history[1]["train/kl"] == pytest.approx(0.0, abs=1e-6)
        assert history[3]["train/kl"] > 0
    else:
        assert max(row["policy_age"] for row in history[1:]) == 2
    assert {path.name for path in (folder / "checkpoints").glob("step_*")} == {"step_000002", "step_000003"}
    assert not (folder / "recovery").exists()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    answer = model.generate(**tokenizer("abc>", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert answer.shape[1] <= 8
    assert "train/loss" in (folder / "report.html").read_text()
    assert json.loads((folder / "trace.json").read_text())
    assert list((folder / "tensorboard").glob("events*"))
    rollouts = Result(folder).rollouts
    assert {"prompt", "response", "rewards", "step", "index"} <= set(rollouts[0])
    for row in history[1:]:  # of the batch only: nothing that was sampled for an evaluation or a later step
        trained = [reward for rollout in rollouts if rollout["step"] == row["step"] for reward in rollout["rewards"]]
        assert len(trained) == CONFIG["training"]["batch_size"] * CONFIG["grpo"]["n_samples"]
        assert row["reward"] == pytest.approx(sum(trained) / len(trained), rel=1e-6)
        assert row["generation/tokens"] == pytest.approx(len(trained) * row["generation/completion_length"])
    assert not {"reward", "accuracy", "generation/completion_length"} & set(history[0])
    assert yaml.safe_load((folder / "config.yaml").read_text())["training"]["steps"] == 3


@pytest.mark.full
@pytest.mark.processes
def test_colocated_run_metrics_match_separate_processes(tmp_path):
    """Two ranks, each with a generator in its process; the same run with separate processes gives the same."""
    turns = ["--async.max_policy_age", "0", "--trainer.procs", "2", "--checkpoint.every", "2"]
    histories = {}
    for name, placement in (("together", ["--colocated", "true"]), ("apart", [])):
        (tmp_path / name).mkdir()
        run_here(*command(tmp_path / name, *turns, *placement))
        histories[name] = rows(tmp_path / name)
        trace = (tmp_path / name / "runs/test/trace.json").read_text()
        assert ("release" in trace) == (name == "together")
    for one, other in zip(*histories.values(), strict=True):
        for metric in ("train/loss", "train/grad_norm") if one["step"] else ("eval/accuracy",):
            assert one[metric] == other[metric], metric
        assert one["step"] == 0 or one["generation/tokens"] == other["generation/tokens"] > 0
    # What both processes generated is counted; when it is, is a matter of time.
    first, second = (sum(row.get("generator/tokens", 0) for row in history) for history in histories.values())
    assert first == second > 0


@pytest.fixture(scope="module")
def supervised(processes, tmp_path_factory):
    """The folder of a run of supervised fine-tuning."""
    folder = tmp_path_factory.mktemp("supervised")
    config = {k: v for k, v in CONFIG.items() if k != "grpo"}
    config["training"] = config["training"] | {"steps": 30, "batch_size": 32, "learning_rate": 3e-3}
    config["eval"] = {"problems": 8, "every": 10, "max_tokens": 8}
    run_here(*command(folder, "--trainer.procs", "2", recipe="sft", config=config))
    return folder


def test_sft_recipe_run_lowers_the_loss(supervised):
    history = rows(supervised)
    assert history[-1]["train/loss"] < 0.8 * history[1]["train/loss"]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
def test_gsm8k_recipe_runs_with_local_files(tmp_path):
    place = ["--run.root", str(tmp_path / "runs"), "--run.name", "test"]
    place += ["--dataset.path", str(GSM8K / "train.jsonl"), "--eval.path", str(GSM8K / "test.jsonl")]
    run_here(sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/gsm8k.yaml", *place)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


def bad(tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a", "answer": "b"}\n{"question": "c", \n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights/config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "t5", "num_layers": 8}')
    rows_ = tmp_path / "rows.jsonl"
    rows_.write_text('{"question": "abcdefghij", "answer": "b"}\n{"question": "c", "answer": "d"}\n')
    path = ["--dataset.task", "null", "--eval.problems", "0", "--dataset.path"]
    return {
        "unknown key": (["--training.lerning_rate", "1"], "did you mean 'learning_rate'"),
        "missing file": ([*path, str(tmp_path / "rosw.jsonl")], "rosw.jsonl"),
        "malformed line": ([*path, str(broken)], r"broken.jsonl.*2"),
        "empty data set": ([*path, str(empty)], "empty"),
        "prompt too long": (
            [*path, str(rows_), "--dataset.max_prompt_tokens", "4", "--dataset.too_long", "error"],
            r"row 1.*max_prompt_tokens",
        ),
        "no weights": (["--from_scratch", "null", "--model", str(tmp_path / "no-weights")], "has no weights"),
        "no model": (["--from_scratch", "null", "--model", str(tmp_path / "nowhere")], "does not exist"),
        "one sample": (["--grpo.n_samples", "1"], "n_samples must be at least 2"),
        "unknown reward": (["--reward.functions", "[Nonsense]"], "reward 'Nonsense' was not found"),
        "overwriting its own model": (
            ["--from_scratch", "null", "--model", str(tmp_path / "runs/test/model")],
            "run.overwrite would remove",
        ),
        "more GPUs than there are": (
            ["--generator.num_replicas", "999", "--generator.with_gpus", "true", "--trainer.with_gpus", "true"],
            r"1000 GPUs are needed \(services.trainer 1, services.generator 999\) and this machine has .*"
            "lower procs or num_replicas, set colocated to true, or set with_gpus to false",
        ),
        "an unsupported family": (
            ["--from_scratch", "null", "--model", str(tmp_path / "other")],
            "model_type 't5': the installed transformers has no such causal language model",
        ),
        "an unsupported reference": (
            ["--grpo.beta", "0.1", "--grpo.reference", str(tmp_path / "other")],
            "model_type 't5': the installed transformers has no such",
        ),
        "replay of routers that are not there": (
            ["--generator.router_replay", "true"],
            "generator.router_replay needs a mixture-of-experts model of a built-in family, got qwen3",
        ),
        "a loss of routers that are not there": (
            ["--training.router_aux_loss", "0.01"],
            "training.router_aux_loss needs a mixture-of-experts model, got qwen3",
        ),
        "no held-out file": (["--dataset.task", "null", "--dataset.path", str(rows_)], "set eval.path"),
    }


CASES = [
    "unknown key",
    "missing file",
    "malformed line",
    "empty data set",
    "prompt too long",
    "no weights",
    "no model",
    "one sample",
    "unknown reward",
    "overwriting its own model",
    "more GPUs than there are",
    "an unsupported family",
    "an unsupported reference",
    "replay of routers that are not there",
    "a loss of routers that are not there",
    "no held-out file",
]


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], {}),
        (["--trainer.procs", "4", "--trainer.with_gpus", "true"], {"trainer": 4}),
        (["--generator.with_gpus", "true"], {"generator": 2}),
        (["--generator.with_gpus", "true", "--generator.hosts", "2"], {"generator": 2}),
        (["--reward.share", "x", "--reward.share_procs", "3", "--reward.with_gpus", "true"], {"reward": 3}),
        (
            [
                *("--colocated", "true", "--async.max_policy_age", "0", "--trainer.procs", "2"),
                *("--generator.with_gpus", "true", "--trainer.with_gpus", "true"),
            ],
            {"trainer": 2},  # whose processes the generator shares
        ),
    ],
)
def test_too_few_gpus_raise_before_run_starts(tmp_path, monkeypatch, overrides, needed):
    cfg = read_config(GRPOConfig, Arguments.parse(command(tmp_path, *overrides)[3:]))
    assert gpus_needed(cfg) == needed
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(sum(needed.values())))))
    check_gpus(cfg)
    if sum(needed.values()) > 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
        with pytest.raises(ValueError, match=r"this machine has 1 \(CUDA_VISIBLE_DEVICES=5\)"):
            check_gpus(cfg)


LAUNCH = """
import json, sys
from forge.recipes.launch import launch
from forge.recipes.rl_config import RLConfig

for argv in json.loads(sys.argv[1]):
    try:
        launch(None, RLConfig, argv)
    except SystemExit as ended:
        print("ended", ended)
"""
EXTRAS = [
    (
        ["--dataset.task", "null", "--dataset.path", "a/b"],
        "datasets",
        "needs the package datasets: pip install datasets",
    ),
    (["--metrics.tensorboard", "true"], "tensorboard", "needs the tensorboard package: pip install tensorboard"),
    (
        ["--reward.verifiers", '{judges: [{url: "http://localhost:1/v1", model: m}]}'],
        *("openai", "LM judges need the openai package: pip install openai"),
    ),
    (
        ["--reward.functions", '[{use: "forge_weaver:Ensemble", path: x}]'],
        *("sklearn", "forge_weaver needs scipy and scikit-learn: pip install scipy scikit-learn"),
    ),
    (["--generator.engine", "vllm"], "vllm", "make a separate environment and install 'vllm=="),
    (["--trainer.backend", "titan"], "torchtitan", "needs TorchTitan 0.3.0: pip install torchtitan==0.3.0"),
    (["--environment", "forge_envs.mcp:StdioTools"], "mcp", "MCP tools need the mcp package: pip install 'mcp>=2,<3"),
    (
        ["--environment", "forge_envs.openenv:OpenEnvEnvironment"],
        *("aiohttp", "OpenEnv needs aiohttp: pip install aiohttp"),
    ),
]


@pytest.mark.full
@pytest.mark.processes
def test_missing_recipe_package_raises_one_line_error(tmp_path):
    """In an environment that has everything but these packages."""
    absent = {module for _, module, _ in EXTRAS}
    places = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    for number, place in enumerate(places):
        (tmp_path / f"site{number}").mkdir()
        for path in place.iterdir():
            if path.name not in absent:
                (tmp_path / f"site{number}" / path.name).symlink_to(path)
    argvs = []
    for number, (overrides, _, _) in enumerate(EXTRAS):
        more = ["--eval.problems", "0"] if overrides[0] in ("--dataset.task", "--environment") else []
        argvs.append([*command(tmp_path, *overrides, *more, "--run.name", f"run{number}")[3:]])
    done = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCH, json.dumps(argvs)],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:" + ":".join(map(str, tmp_path.glob("site*")))},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert len(said) == len(EXTRAS), done.stdout + done.stderr
    for line, (_, _, message) in zip(said, EXTRAS, strict=True):
        assert line.startswith("ended error: ")
        assert message in line
    assert not list(tmp_path.glob("runs/run*[0-9]"))


@pytest.mark.parametrize("case", CASES)
def test_invalid_config_starts_no_process(tmp_path, case):
    overrides, message = bad(tmp_path)[case]
    small_model(tmp_path / "runs/test/model")
    before = descendants(os.getpid())
    with pytest.raises(SystemExit) as ended:
        launch(None, GRPOConfig, command(tmp_path, *overrides)[3:])  # where None would be run, checks are over
    assert re.fullmatch(f"error: .*{message}.*", str(ended.value))  # a dot is no end of a line
    assert descendants(os.getpid()) == before
    assert not (tmp_path / "runs/test/config.yaml").exists()


def test_failed_run_directory_is_replaced_unless_dataset_is_inside(tmp_path):
    data = tmp_path / "runs/test/rows.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text('{"question": "abc", "answer": "cba"}\n')
    words = ["--dataset.task", "null", "--dataset.path", str(data), "--eval.problems", "0", "--run.overwrite", "false"]
    cfg = read_config(GRPOConfig, Arguments.parse(command(tmp_path, *words)[3:]))
    (data.parent / "metrics.jsonl").write_text("")  # left by a run that made no step
    with pytest.raises(ValueError, match=r"would remove .*rows\.jsonl, which the new run reads"):
        prepare_run(cfg, Start())
    cfg.dataset.path = str(data.rename(tmp_path / "rows.jsonl"))
    prepare_run(cfg, Start())[-1].close()


def small_model(folder: Path) -> str:
    return build_small_model(
        folder, seed=0, alphabet=CONFIG["from_scratch"]["alphabet"], hidden_size=32, layers=2, heads=2, kv_heads=2,
        max_positions=64,
    )  # fmt: skip


def gone(pids: list[int]) -> bool:
    def ended(pid: int) -> bool:
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"

    return all(ended(pid) for pid in pids)
