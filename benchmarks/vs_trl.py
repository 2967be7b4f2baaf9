"""GRPO against TRL's GRPOTrainer: completion tokens per CPU-second and the reward curve, both sides in one run.

The same algorithm on both sides: a small Qwen3 with random weights and a vocabulary of bytes, 4 prompts x 8 samples x
exactly 64 tokens a step, float32, group-normalised advantages, clip 0.2, no KL, AdamW at a constant 1e-3. The reward
is the share of a completion's characters that are ASCII digits. Ours is the real system, `apps.grpo.main` with all of
its processes, in lock-step (`max_policy_age` 0). Sides take turns; every process has one thread. CPU-seconds are those
of all processes of a side, from the end of the second step to the end of the last. Each round has its own seed for the
initial weights, the prompts and the sampling, the same on both sides; `Learning` compares them in pairs.

TRL suppresses <eos> to hold the length (`min_new_tokens`); ours has a model without one, so that a sampled <eos> is a
token like any other.

    python benchmarks/vs_trl.py --trl-python PYTHON_WITH_TRL                                # 3.2M
    python benchmarks/vs_trl.py --trl-python PYTHON_WITH_TRL --hidden 512 --layers 8        # 25M
    python benchmarks/vs_trl.py --trl-python PYTHON_WITH_TRL --prompt 256 --group 16        # long prompts
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sides import WARMUP, Clock, measure, recipe


def digit_share(prompt: str, response: str, target: str) -> float:
    return sum("0" <= c <= "9" for c in response) / max(1, len(response))


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """The model, its tokenizer and the prompts, as both sides read them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 128,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    if args.config:
        config = AutoConfig.from_pretrained(args.config, vocab_size=len(tokenizer), eos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(args.seed)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(args.prompts * (args.steps + 1)):
            text = f"{rng.randrange(10**6)}+{rng.randrange(10**6)}=".rjust(args.prompt)[: args.prompt]
            file.write(json.dumps({"question": text}) + "\n")


def ours(folder: Path, args: argparse.Namespace) -> Clock:
    from forge.config import build
    from forge.recipes.rl_config import RLConfig as GRPOConfig

    config: dict[str, Any] = {
        "model": str(folder / "model"),
        "run": {"name": "run", "root": str(folder), "overwrite": True},
        "dataset": {"path": str(folder / "prompts.jsonl"), "shuffle": False, "target_field": None},
        "training": {"batch_size": args.prompts, "steps": args.steps, "learning_rate": 1e-3, "beta2": 0.999},
        "grpo": {"n_samples": args.group, "clip_high": 0.2, "max_tokens": args.length},
        "async": {"max_policy_age": 0},
        "reward": {"functions": ["vs_trl:digit_share"]},
        "generator": {"slots": args.prompts * args.group},
        "eval": {"problems": 0},
        "seed": args.seed,
    }
    if args.gpu:
        config["training"]["dtype"] = config["generator"]["dtype"] = "bfloat16"
        config["services"] = {"generator": {"with_gpus": True}, "trainer": {"with_gpus": True}}
        config["colocated"] = True
    return recipe(build(GRPOConfig, config))


def theirs(folder: Path, args: argparse.Namespace) -> Clock:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    clock = Clock()

    class Callback(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

        def on_log(self, *_: Any, **named: Any) -> None:
            if "reward" in named["logs"]:
                clock.rewards.append(named["logs"]["reward"])

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [digit_share(prompt, completion, "") for prompt, completion in zip(prompts, completions, strict=True)]

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=not args.gpu,
            bf16=bool(args.gpu),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            seed=args.seed,
            max_steps=args.steps,
            per_device_train_batch_size=args.prompts * args.group,
            num_generations=args.group,
            max_completion_length=args.length,
            generation_kwargs={"min_new_tokens": args.length},
            temperature=1.0,
            loss_type="grpo",
            scale_rewards="group",
            epsilon=0.2,
            beta=0.0,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            gradient_checkpointing=False,
            shuffle_dataset=False,
        ),
        reward_funcs=reward,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list([{"prompt": row["question"]} for row in rows]),
        callbacks=[Callback()],
    )
    trainer.train()
    return clock


def learning(rounds: list[dict[str, Any]]) -> None:
    """Print the paired difference of both sides' learning, with its 95 % interval (Student's t)."""
    from scipy import stats

    gaps = [statistics.mean(r["ours"]["rewards"]) - statistics.mean(r["trl"]["rewards"]) for r in rounds]
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
    half = float(stats.t.ppf(0.975, len(gaps) - 1)) * error
    print(f"\nLearning: mean reward of all steps, ours less TRL's: {mean:+.3f} (95 % interval +- {half:.3f})")


def reached(rewards: Iterable[float], goal: float = 0.9) -> str:
    return next((str(step) for step, reward in enumerate(rewards, 1) if reward >= goal), "not reached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL; without it, only our side")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--config", default="", help="folder with the config of another class, instead of both")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt, at least 16 to hold all of it")
    parser.add_argument("--length", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn, each with another seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", type=int, default=0, help="1: both sides on a GPU, in bfloat16")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        (ours if args.side == "ours" else theirs)(args.folder, args).show()
        return
    if args.steps <= WARMUP:
        parser.error(f"--steps must be more than {WARMUP}: those are not measured")
    pythons = {"ours": sys.executable} | ({"trl": args.trl_python} if args.trl_python else {})
    sizes = {
        name: getattr(args, name)
        for name in ("hidden", "layers", "prompts", "group", "prompt", "length", "steps", "gpu")
    }
    rounds = []
    for seed in range(args.seed, args.seed + args.rounds):
        with tempfile.TemporaryDirectory() as name:
            prepare(Path(name), argparse.Namespace(**sizes, config=args.config, seed=seed))
            found = {
                side: measure(python, __file__, side, Path(name), **sizes, seed=seed)
                for side, python in pythons.items()
            }
            rounds.append(found)
        curves = "; ".join(f"{side} " + " ".join(f"{r:.3f}" for r in found[side]["rewards"]) for side in found)
        print(f"seed {seed}: {curves}", file=sys.stderr, flush=True)
    tokens = args.prompts * args.group * args.length
    from processor import described  # torch comes along, which the sides load with their own settings

    print(f"{described()}\n")
    print("| side | CPU-s a step | tokens per CPU-s | wall s a step | tokens per s | MB | reward 0.9 at step |")
    print("|---|---|---|---|---|---|---|")
    for side in pythons:
        cpu, wall, memory = (statistics.median(r[side][what] for r in rounds) for what in ("cpu", "wall", "memory"))
        row = f"| {side} | {cpu:.2f} | {tokens / cpu:.0f} | {wall:.2f} | {tokens / wall:.0f} | {memory:.0f} | "
        print(row + ", ".join(reached(r[side]["rewards"]) for r in rounds) + " |")
    for what, unit in (("cpu", "CPU-second"), ("wall", "second")) if args.trl_python else ():
        ratios = sorted(r["trl"][what] / r["ours"][what] for r in rounds)
        print(
            f"\nTokens per {unit}, ours to TRL's: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    if args.trl_python and args.rounds > 1:
        learning(rounds)
    print(f"\nMean reward of a step, median of the runs:\n\n| step | {' | '.join(pythons)} |")
    print("|---" * (len(pythons) + 1) + "|")
    for step in range(args.steps):
        columns = (f"{statistics.median(r[side]['rewards'][step] for r in rounds):.3f}" for side in pythons)
        print(f"| {step + 1} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
