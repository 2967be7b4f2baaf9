"""A real pretrained model learns to answer in JSON: curves and costs of `apps/real/json.yaml`, and the same by TRL.

    python benchmarks/real.py --seeds 0 1 2 --ways full lora --picture docs/real.png
    python benchmarks/real.py --seeds 0 --ways full trl --trl-python PYTHON_WITH_TRL --steps 15

Sides run one after the other, with one thread in each process. Accuracy is on the held-out questions of the
configuration, greedy, before and after; seconds and CPU-seconds are of everything from the first process on, without
the evaluation of TRL's model, which this library does. `--runs FOLDER` keeps the run folders; a run that is there
already is read and not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "apps/real/json.yaml"
LORA = ["--lora.rank", "16", "--training.learning_rate", "3e-4"]
COLORS = {"full": "#1f77b4", "lora": "#2ca02c", "trl": "#d62728"}
NAMES = {"full": "all weights", "lora": "LoRA, rank 16", "trl": "TRL, all weights"}


def run_one(way: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, or what it has left: its costs, evaluations [(step, accuracy)] and rewards [(step, reward)]."""
    folder = arguments.runs / f"{way}-{seed}"
    result = folder / "benchmark.json"
    if result.exists():
        return json.loads(result.read_text())
    environment = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")])
    if way == "trl":
        own = [arguments.trl_python, __file__, "--side", json.dumps([str(folder), seed, arguments.steps])]
        own += ["--model", str(arguments.model)]
    else:
        own = [sys.executable, "-m", "apps.grpo.main", "--config", str(CONFIG), "--model", str(arguments.model)]
        own += ["--run.root", str(arguments.runs), "--run.name", f"{way}-{seed}", "--seed", str(seed)]
        own += ["--training.steps", str(arguments.steps), *(LORA if way == "lora" else [])]
    wall, cpu = time.perf_counter(), cpu_seconds()
    subprocess.run(own, cwd=ROOT, env=environment, check=True)
    found: dict[str, Any] = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["rewards"] = [(row["step"], row["reward"]) for row in rows if "reward" in row]
    found["tokens"] = sum(row.get("generation/tokens", 0) for row in rows)
    found["accuracy"] = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    if way == "trl":
        found["accuracy"] = [(0, accuracy(arguments.model)), (arguments.steps, accuracy(folder / "model"))]
    result.write_text(json.dumps(found))
    return found


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def config(model: Path) -> Any:
    from forge.config import read
    from forge.recipes.rl_config import RLConfig

    return read(RLConfig, CONFIG, [("model", str(model))])


def accuracy(model: Path) -> float:
    """Of a model's greedy answers to the held-out questions."""
    import forge

    cfg = config(model)
    found = forge.evaluate(
        str(model),
        dataset={**cfg.dataset},
        reward="JsonMatch",
        problems=cfg.eval.problems,
        max_tokens=cfg.grpo.max_tokens,
        generator={"slots": 64, "max_seq_len": 160},
    )
    return found["eval/accuracy"]


def train_with_trl(folder: Path, seed: int, steps: int, model: Path) -> None:
    """GRPOTrainer with the settings of the configuration; leaves metrics.jsonl and the model."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from forge.data.load import load_data
    from forge.models import resolve_model
    from forge.rewards.rules import JsonMatch

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    cfg, start = config(model), resolve_model(str(model))
    tokenizer = AutoTokenizer.from_pretrained(start)
    data: Any = iter(load_data(tokenizer, kind="prompts", seed=seed, **cfg.dataset))
    rows = []
    for _ in range(cfg.training.batch_size * steps):
        sample = next(data)
        rows.append({"prompt": tokenizer.decode(sample.prompt.token_ids), "target": sample.target})
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "metrics.jsonl").open("w")

    class Callback(TrainerCallback):
        def on_log(self, _args: Any, state: Any, *_: Any, **named: Any) -> None:
            if "reward" in (logs := named["logs"]):
                tokens = logs["completions/mean_length"] * cfg.training.batch_size * cfg.grpo.n_samples
                row = {"step": state.global_step, "reward": logs["reward"], "generation/tokens": tokens}
                log.write(json.dumps(row) + "\n")
                log.flush()

    def reward(prompts: list[str], completions: list[str], target: list[str], **_: Any) -> list[float]:
        match = JsonMatch()
        return [match(*each) for each in zip(prompts, completions, target, strict=True)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=cfg.training.batch_size * cfg.grpo.n_samples,
            num_generations=cfg.grpo.n_samples,
            max_completion_length=cfg.grpo.max_tokens,
            temperature=cfg.grpo.temperature,
            loss_type="grpo",
            scale_rewards="group",
            epsilon=0.2,
            beta=0.0,
            learning_rate=cfg.training.learning_rate,
            warmup_steps=cfg.training.warmup_steps,
            lr_scheduler_type="constant_with_warmup",
            adam_beta2=cfg.training.beta2,
            weight_decay=0.0,
            max_grad_norm=cfg.training.max_grad_norm,
            gradient_checkpointing=False,
            shuffle_dataset=False,
        ),
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Callback()],
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    tokenizer.save_pretrained(folder / "model")


def draw(path: Path, runs: dict[tuple[str, int], dict[str, Any]]) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    for (way, seed), found in runs.items():
        label = f"{NAMES[way]}, seed {seed}"
        style: dict[str, Any] = {"color": COLORS[way], "alpha": 1 - 0.25 * (seed % 4), "label": label}
        left.plot(*zip(*found["accuracy"], strict=True), "o-", ms=3, **style)
        right.plot(*zip(*found["rewards"], strict=True), lw=1, **style)
    for axis, title in ((left, "held-out answers that are right (greedy)"), (right, "mean reward (sampled)")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("GRPO step")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", choices=list(NAMES), nargs="+", default=["full", "lora"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/real")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL, and with this library's packages")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        folder, seed, steps = json.loads(arguments.side)
        train_with_trl(Path(folder), seed, steps, arguments.model)
        return
    if "trl" in arguments.ways and arguments.trl_python is None:
        parser.error("--trl-python is missing")
    runs = {(way, seed): run_one(way, seed, arguments) for seed in arguments.seeds for way in arguments.ways}
    print("| | seed | held-out before | after | minutes | CPU-seconds | completion tokens per CPU-second |")
    print("|---|---|---|---|---|---|---|")
    for (way, seed), found in runs.items():
        (_, before), *_, (_, after) = found["accuracy"]
        print(
            f"| {NAMES[way]} | {seed} | {before:.3f} | {after:.3f} | {found['wall'] / 60:.1f} | {found['cpu']:.0f} | "
            f"{found['tokens'] / found['cpu']:.1f} |"
        )
    if "trl" in arguments.ways and "full" in arguments.ways:
        each = [
            {way: runs[way, seed]["tokens"] / runs[way, seed]["cpu"] for way in ("full", "trl")}
            for seed in arguments.seeds
        ]
        ratio = statistics.median(pair["full"] / pair["trl"] for pair in each)
        print(f"\nCompletion tokens per CPU-second, ours to TRL's: {ratio:.2f}")
    if arguments.picture:
        draw(arguments.picture, runs)


if __name__ == "__main__":
    main()
