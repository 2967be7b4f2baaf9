"""Warm up and train a small model of each named class by the quickstart's two recipes, GRPO with three seeds.

    python scripts/run_families.py --folder runs/families [KINDS]      # the table of docs/models.md

Two runs at a time, one thread each; one that has finished is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "src"), str(ROOT / "scripts")]
KINDS = (
    *("qwen3", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss", "gemma3n_text", "gemma4_text", "glm4", "glm4_moe"),
    *("granite", "granitemoehybrid", "lfm2", "nemotron_h", "deepseek_v3", "olmo3", "smollm3", "ministral3"),
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz>"
SEEDS = (0, 1, 2)
STEPS = 25  # of GRPO; a class that has not learned then gets more with --steps


def write_model(folder: Path, kind: str) -> None:
    """Write a model of this class with random weights of about a million parameters, and a character tokenizer."""
    import torch
    from describe_families import language_config
    from transformers import AutoModelForCausalLM

    from forge.models.tokenizer import character_tokenizer
    from forge_families import probe

    wide = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "head_dim": 32,
        "moe_intermediate_size": 96,
        "mamba_d_head": 32,
        **{"kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 32},
        **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),  # ten letters are padded to a chunk
    }
    probe.SIZES.update(wide)
    config = probe.shrink_config(language_config(kind))
    tokenizer = character_tokenizer(ALPHABET)
    config.vocab_size, config.eos_token_id, config.bos_token_id = len(tokenizer), tokenizer.eos_token_id, None
    config.pad_token_id = tokenizer.pad_token_id
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = len(tokenizer)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":  # a factor for a million positions makes those of ten letters alike
        config.rope_parameters = {**rope, "rope_type": "default"}
    if getattr(config, "per_layer_config", None):  # heads of 512 in Gemma 4's global layers
        layers = [i for i, layer_type in enumerate(config.layer_types) if layer_type == "full_attention"]
        config.per_layer_config = {layer: {"head_dim": wide["head_dim"]} for layer in layers}

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for module in model.modules():
            # Gemma 3n and 4 do not divide the scores of normalised queries and keys, which one key then wins at random:
            # their published models have learned small norms.
            if getattr(module, "scaling", None) == 1 and hasattr(module, "q_norm"):
                module.q_norm.weight.mul_(module.head_dim**-0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_recipe(app: str, run: Path, *options: str) -> None:
    """Run a recipe of `apps` with one thread, unless it has finished."""
    done = run.with_suffix(".done")
    if done.exists():
        return
    command = [sys.executable, "-m", f"apps.{app}.main", "--config", f"{ROOT}/apps/{app}/tiny.yaml"]
    command += ["--run.root", str(run.parent), "--run.name", run.name, "--services.trainer.procs", "1", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with run.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
    done.touch()


def train_kind(kind: str, folder: Path, steps: int) -> str:
    """Run all recipes of a class, GRPO for so many steps, and return its row of the table."""
    own = folder / kind
    if not (own / "config.json").exists():
        write_model(own, kind)
    # Nemotron-H's engine computes all tokens again for each one.
    batch = ["--training.batch_size", "32"] if kind == "nemotron_h" else []
    warm_up = folder / f"{kind}-warmup"
    few = ["--eval.problems", "64"] if batch else []
    start = ["--model", str(own), "--from_scratch", "null", "--training.steps", "160"]
    run_recipe("sft", warm_up, *start, "--eval.every", "5", "--eval.stop_at", "0.3", *few)  # with room to learn
    columns: dict[str, list[float]] = {}
    for seed in SEEDS:
        run = folder / f"{kind}-{seed}{'' if steps == STEPS else f'-{steps}'}"
        options = ["--model", str(warm_up / "model"), "--training.steps", str(steps), "--seed", str(seed), *few, *batch]
        stop = "1.0" if steps == STEPS else "0.95"
        run_recipe("grpo", run, *options, "--eval.every", str(STEPS), "--eval.stop_at", stop)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        evaluated = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
        sampled = [row["accuracy"] for row in rows if "accuracy" in row]
        differences = [row["train/engine_difference"] for row in rows if "train/engine_difference" in row]
        for name, value in (
            *(("before", evaluated[0]), ("after", evaluated[-1]), ("steps", len(sampled))),
            *(("first", statistics.mean(sampled[:3])), ("last", statistics.mean(sampled[-3:]))),
            ("difference", max(differences)),
        ):
            columns.setdefault(name, []).append(value)

    def join(name: str) -> str:
        return ", ".join(f"{value:.2f}" for value in columns[name])

    counts = ", ".join(str(count) for count in columns["steps"])
    return (
        f"| `{kind}` | {counts} | {columns['before'][0]:.3f} to {join('after')} | {join('first')} to {join('last')} | "
        f"{max(columns['difference']):.0e} |"
    )


def main() -> None:
    """Print the table's rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--folder", type=Path, default=Path("runs/families"))
    parser.add_argument("--steps", type=int, default=STEPS, help="of GRPO; beyond 25 it stops at 0.95")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda kind: train_kind(kind, folder, options.steps), options.kinds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
