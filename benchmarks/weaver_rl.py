"""What a reward without labels is worth: GRPO on the quickstart's task under four rewards, three seeds.

    python benchmarks/weaver_rl.py --start runs/quickstart-warmup/model --folder runs/weaver-rl \
        --picture docs/weaver_rl.png

Several annotators, each of whom is wrong about a response with probability `--noise`, look at answers of the model that
RL starts from. A reward model is trained (`apps/reward_model`) from what each of them prefers. The rewards are then

    single      the first, second, third of these models only, for the seeds 0, 1, 2
    weaver      all of them, with rules and answer frequency, put together without labels (`apps/weaver`)
    distilled   one of these models, which has learned the ensemble's probabilities
    pooled      one model that is trained on what all annotators prefer, as often on each pair: whoever has their
                preferences and not just their models needs no ensemble
    truth       whether the answer is right

Prints held-out accuracy, and the share of the gap from `single` to `truth` that the others close; draws, of each run,
the reward that training saw against the truth. What `--folder` already holds is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib
from quickstart import ROOT

matplotlib.use("Agg")
from matplotlib import pyplot

from apps.toys.words import Reverse
from forge.types import Sampling

TASK = {"task": "apps.toys.words:Reverse", "difficulty": [4, 4]}
REWARDS = ("single", "weaver", "distilled", "pooled", "truth")
GRPO = {"checkpoint.every": 0, "eval.every": 10}


def collect(start: Path, file: Path, problems: int) -> None:
    """Eight answers of the first policy to each of so many words."""
    from transformers import AutoTokenizer

    from forge.engines import EmbeddedEngine

    tokenizer, engine = AutoTokenizer.from_pretrained(start), EmbeddedEngine(start, slots=512)
    rows = list(islice(Reverse().rows(seed=1000, difficulty=TASK["difficulty"]), problems))
    asked = [
        engine.submit(tokenizer(f"{row.question}>")["input_ids"], Sampling(n=8, max_tokens=10, temperature=0.8, seed=i))
        for i, row in enumerate(rows)
    ]
    with file.open("w") as out:
        for row, future in zip(rows, asked, strict=True):
            texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in future.result()]
            print(json.dumps({**row._asdict(), "responses": texts}), file=out)
    engine.close()


def annotate(collected: list[dict[str, Any]], file: Path, noise: float, seed: int) -> None:
    """The pairs of an annotator: each answer taken for right, preferred to one of the same problem taken for wrong."""
    rng = random.Random(seed)
    with file.open("w") as out:
        for row in collected:
            taken = [(text == row["answer"]) != (rng.random() < noise) for text in row["responses"]]
            wrong = [text for text, right in zip(row["responses"], taken, strict=True) if not right]
            for text in (text for text, right in zip(row["responses"], taken, strict=True) if right and wrong):
                if (other := rng.choice(wrong)) != text:
                    print(json.dumps({"question": row["question"], "chosen": text, "rejected": other}), file=out)


def recipe(app: str, config: str, folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """Run a recipe of `apps/` unless it has run."""
    if not (folder / name / "finished").exists():
        environment = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", **os.environ}
        settings = {"run.root": folder, "run.name": name, "run.overwrite": True, **settings}
        command = [sys.executable, "-m", f"apps.{app}.main", "--config", f"apps/{config}.yaml"]
        for key, value in settings.items():
            command += [f"--{key}", json.dumps(value, default=str)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder / name


def reward_models(start: Path, folder: Path, args: argparse.Namespace) -> list[Path]:
    """The models of several annotators, each of whom has seen problems of their own."""
    responses = folder / "responses.jsonl"
    if not responses.exists():
        collect(start, responses.with_suffix(".part"), args.annotators * args.problems)
        responses.with_suffix(".part").rename(responses)
    collected = [json.loads(line) for line in responses.read_text().splitlines()]
    files = []
    for i in range(args.annotators):
        files.append(folder / f"annotator{i}.jsonl")
        annotate(collected[i * args.problems : (i + 1) * args.problems], files[i], args.noise, i)
    trained = [reward_model(start, file, folder, i, args.reward_model_steps) for i, file in enumerate(files)]
    return trained


def pooled_model(start: Path, folder: Path, args: argparse.Namespace) -> Path:
    """One model of what all annotators prefer."""
    pairs = folder / "annotators.jsonl"
    pairs.write_text("".join((folder / f"annotator{i}.jsonl").read_text() for i in range(args.annotators)))
    return reward_model(start, pairs, folder, args.annotators, args.reward_model_steps * args.annotators)


def reward_model(start: Path, pairs: Path, folder: Path, number: int, steps: int) -> Path:
    settings = {"model": start, "seed": number, "dataset.task": None, "dataset.difficulty": 5, "dataset.path": pairs}
    settings |= {"training.steps": steps, "eval.problems": 0}
    return recipe("reward_model", "reward_model/tiny", folder, f"reward-model{number}", settings) / "model"


def train(
    reward: str, seed: int, start: Path, folder: Path, models: list[Path], pooled: Path | None
) -> list[dict[str, float]]:
    """GRPO under one of the rewards; the rows of its metrics."""
    shared = {"model": start, "seed": seed}
    described = [{"path": str(path), "name": f"reward_model{i}"} for i, path in enumerate(models)]
    if reward in ("weaver", "distilled"):
        making = shared | {"collect.problems": 3000, "verifiers.reward_models": described}
        making |= {"distil.model": models[seed % len(models)], "distil.epochs": 2, "distil.learning_rate": 3e-4}
        ensemble = recipe("weaver", "weaver/tiny", folder, f"ensemble{seed}", making)
    given: dict[str, Any] = {
        "single": lambda: {"reward.verifiers": {"reward_models": [described[seed % len(described)]]}},
        "weaver": lambda: {"reward.functions": [{"use": "forge_weaver:Ensemble", "path": str(ensemble)}]},
        "distilled": lambda: {
            "reward.functions": [{"use": "forge_weaver:Distilled", "path": str(ensemble / "distilled")}]
        },
        "pooled": lambda: {"reward.verifiers": {"reward_models": [{"path": str(pooled)}]}},
        "truth": lambda: {"reward.functions": ["ExactMatch"]},
    }[reward]()
    run = recipe(
        "grpo", "weaver/grpo", folder, f"{reward}{seed}", {"reward.functions": None, **GRPO, **shared, **given}
    )
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def held_out(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def smooth(values: list[float], width: int = 10) -> list[float]:
    return [statistics.mean(values[max(0, i - width) : i + 1]) for i in range(len(values))]


def draw(path: Path, runs: dict[str, dict[int, list[dict[str, float]]]]) -> None:
    """Above, held-out accuracy by step; below, what the policy's reward said against how many of its samples were
    right, from the first step (dot) to the last."""
    figure, axes = pyplot.subplots(2, len(runs), figsize=(3 * len(runs), 5.5), sharey=True)
    for (name, seeds), above, below in zip(runs.items(), *axes, strict=True):
        for rows in seeds.values():
            above.plot(*zip(*held_out(rows), strict=True), lw=1.2)
            trained = [row for row in rows if {"reward", "accuracy"} <= row.keys()]
            proxy, truth = (smooth([row[key] for row in trained]) for key in ("reward", "accuracy"))
            (line,) = below.plot(proxy, truth, lw=1.2)
            below.plot(proxy[0], truth[0], "o", ms=4, color=line.get_color())
        above.set_title(name, fontsize=10)
        above.set_xlabel("step", fontsize=8)
        below.set_xlabel("mean reward", fontsize=8)
    axes[0][0].set_ylabel("held-out accuracy", fontsize=9)
    axes[1][0].set_ylabel("accuracy of samples", fontsize=9)
    for axis in axes.flat:
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS), choices=REWARDS)
    parser.add_argument("--annotators", type=int, default=5)
    parser.add_argument("--problems", type=int, default=8000, help="of each annotator")
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--reward-model-steps", type=int, default=250)
    args = parser.parse_args()
    folder, start = args.folder.resolve(), args.start.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    models = reward_models(start, folder, args)
    pooled = pooled_model(start, folder, args) if "pooled" in args.rewards else None
    runs: dict[str, dict[int, list[dict[str, float]]]] = {name: {} for name in args.rewards}
    for seed in args.seeds:
        for reward in args.rewards:
            runs[reward][seed] = train(reward, seed, start, folder, models, pooled)
    print("| reward | before | best | after | of each seed | gap closed |\n|---|---|---|---|---|---|")
    after = {name: [held_out(rows)[-1][1] for rows in seeds.values()] for name, seeds in runs.items()}
    for name, seeds in runs.items():
        before = statistics.mean(held_out(rows)[0][1] for rows in seeds.values())
        best = statistics.mean(max(accuracy for _, accuracy in held_out(rows)) for rows in seeds.values())
        low, high = (statistics.mean(after.get(end, [float("nan")])) for end in ("single", "truth"))
        share = (statistics.mean(after[name]) - low) / (high - low)
        each = " ".join(f"{accuracy:.3f}" for accuracy in after[name])
        print(f"| {name} | {before:.3f} | {best:.3f} | {statistics.mean(after[name]):.3f} | {each} | {share:.2f} |")
    if args.picture:
        draw(args.picture, runs)


if __name__ == "__main__":
    main()
