"""Parts of `gpu.py` that start whole programs: the quickstart, GRPO at 135M with vLLM, TRL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_setup import Row, Setup, build
from transformers import GraniteConfig, GraniteForCausalLM

from forge.runtime.process import end_with_parent

ROOT = Path(__file__).parents[1]
WARMUP = ROOT / "runs/quickstart-warmup/model"


def start_program(*words: object) -> str:
    """What a Python program prints; its log is written to this process's, and it ends with this process."""
    command, ends = [sys.executable, *map(str, words)], partial(end_with_parent, os.getpid())
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=ends).stdout


def run_grpo(name: str, setup: Setup, options: dict[str, Any]) -> list[dict[str, float]]:
    """The metrics of a run of the quickstart's recipe, lock-step, with one device for trainer and generator."""
    options = {
        "run.name": name,
        "run.root": setup.folder,
        "colocated": "true",
        "async.max_policy_age": "0",
        "services.generator.num_replicas": "1",
        "services.generator.with_gpus": str(setup.real).lower(),
        "services.trainer.with_gpus": str(setup.real).lower(),
        "training.dtype": setup.dtype,
        "generator.dtype": setup.dtype,
        "checkpoint.every": "0",
        **options,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    start_program("-m", "apps.grpo.main", "--config", "apps/grpo/tiny.yaml", *words)
    return [json.loads(line) for line in (setup.folder / name / "metrics.jsonl").read_text().splitlines()]


def quickstart(setup: Setup) -> Iterator[Row]:
    """The quickstart from its warm-up; in a quick run without one, two steps of it."""
    model = WARMUP
    if not model.exists():
        few = ["--training.steps", 2, "--eval.problems", 0, "--run.root", setup.folder] if setup.quick else []
        start_program("-m", "apps.sft.main", "--config", "apps/sft/tiny.yaml", *few)
        model = setup.folder / "quickstart-warmup/model" if setup.quick else WARMUP
    steps = 2 if setup.quick else 30
    options = {"model": model, "training.steps": steps, "eval.every": max(1, steps // 2), "training.warmup_steps": 1}
    rows = run_grpo("quickstart", setup, options)
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    figure = f"{accuracies[0]:.3f} to {accuracies[-1]:.3f} in {steps} steps"
    learned = setup.quick or accuracies[-1] >= 0.7
    yield Row("quickstart: held-out accuracy", figure, "" if setup.quick else "at least 0.7", learned)
    yield Row(
        "quickstart: a step", f"{np.median([row['seconds/step'] for row in rows if 'seconds/step' in row]):.2f} s"
    )


def time_grpo(what: str, options: dict[str, Any], setup: Setup) -> Iterator[Row]:
    """Ten steps of 64 prompts with 8 samples of 128 tokens."""
    options = {
        "model": setup.model,
        "training.steps": 2 if setup.quick else 10,
        "training.batch_size": 4 if setup.quick else 64,
        "training.warmup_steps": 1,
        "training.seq_len": 8192,
        "grpo.max_tokens": 8 if setup.quick else 128,
        "generator.max_seq_len": 256,
        "eval.problems": 0,
        **options,
    }
    rows = [row for row in run_grpo("grpo", setup, options) if "generation/tokens" in row]
    seconds, tokens = (float(np.median([row[key] for row in rows])) for key in ("seconds/step", "generation/tokens"))
    yield Row(f"{what}: a step, tokens/s", f"{seconds:.2f} s, {tokens / seconds:,.0f}")
    # In the first step the weights that sampled are those that are trained.
    apart = rows[0]["train/engine_difference"]
    yield Row.at_most(f"{what}: engine and trainer apart", apart, 5e-2 if setup.real else 1e-4)


def grpo_135m(setup: Setup) -> Iterator[Row]:
    """GRPO of a Granite of SmolLM2-135M's shape by transformers' own modules and packed attention, with vLLM where it
    is installed."""
    sizes = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    if setup.size == "tiny":
        sizes = {"vocab_size": 512, "hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
    config = GraniteConfig(**sizes, **heads, tie_word_embeddings=True)
    folder, engine = setup.folder / "granite", setup.engines[-1]
    build(folder, config, GraniteForCausalLM, torch.bfloat16)
    options = {"model": folder, "generator.engine": engine}
    if engine == "vllm" and setup.real:
        options["generator.vllm.gpu_memory_utilization"] = 0.5
    yield from time_grpo(f"GRPO of a Granite of 135M, {engine}", options, setup)
    if engine != "vllm":
        yield Row("vllm", "not installed here")


def trl(setup: Setup) -> Iterator[Row]:
    """GRPO by this library and by TRL on the same card, same settings, in turn (`vs_trl.py`)."""
    if subprocess.run([setup.trl, "-c", "import importlib.util as u; exit(not u.find_spec('trl'))"]).returncode:
        yield Row("TRL", f"not installed in {setup.trl}")
        return
    tiny = ["--hidden", 128, "--layers", 1, "--prompts", 2, "--group", 2, "--length", 4, "--steps", 3, "--rounds", 1]
    sizes = tiny if setup.size == "tiny" else ["--hidden", 768, "--layers", 19, "--steps", 8, "--rounds", 2]
    found = start_program("benchmarks/vs_trl.py", "--trl-python", setup.trl, "--gpu", int(setup.real), *sizes)
    for line in found.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 6 and cells[0] in ("ours", "trl"):
            yield Row(f"GRPO at 135M, {cells[0]}: a step, tokens/s", f"{cells[3]} s, {cells[4]}")
        elif line.startswith("Tokens per second"):
            yield Row(line.partition(": ")[0], line.partition(": ")[2])
