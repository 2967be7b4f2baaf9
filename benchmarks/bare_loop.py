"""The real system against a bare loop: seconds and CPU-seconds of a GRPO step, both sides in one run.

Model, task, batch and algorithm are those of the quickstart, `apps/grpo/tiny.yaml`. The real system runs its recipe as
it is (three processes of one thread); the bare loop has an engine and a trainer in one process of two threads, and
nothing around them: no messages, no buffer, no metrics. Sides take turns. The issue is what the processes cost: the
real system should take at most 1.15 times the seconds and 1.3 times the CPU-seconds.

    python benchmarks/bare_loop.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from sides import WARMUP, Clock, measure, recipe

ROOT = Path(__file__).resolve().parents[1]


def configuration(folder: Path, args: argparse.Namespace) -> Any:
    from forge.config import load
    from forge.recipes.rl_config import RLConfig as GRPOConfig

    values = {
        "config": ROOT / "apps/grpo/tiny.yaml",
        "model": folder / "model",
        "run.root": folder,
        "training.steps": args.steps,
        "checkpoint.every": 0,
        "eval.problems": 0,
        "async.max_policy_age": args.max_policy_age,
        "seed": args.seed,
    }
    return load(GRPOConfig, [word for name, value in values.items() for word in (f"--{name}", str(value))])


def prepare(folder: Path) -> None:
    """The quickstart's warmed-up model, or else a new one of its size."""
    warm = ROOT / "runs/quickstart-warmup/model"
    if warm.is_dir():
        (folder / "model").symlink_to(warm)
        return
    from forge.config import load
    from forge.models import build_small_model
    from forge.recipes.sft import SFTConfig

    print("No runs/quickstart-warmup/model: starting from a random model of the same size.\n")
    scratch = load(SFTConfig, ["--config", str(ROOT / "apps/sft/tiny.yaml")]).from_scratch
    assert scratch is not None
    build_small_model(folder / "model", seed=0, **scratch)


def bare(cfg: Any) -> Clock:
    """The recipe without the system: the same steps, one after the other."""
    import torch
    from transformers import AutoTokenizer

    from forge.actors.reward import load_reward
    from forge.algorithms.advantages import group_relative
    from forge.data.load import load_data
    from forge.data.packing import pack
    from forge.engines import EmbeddedEngine
    from forge.training.credit import skip_idle
    from forge.training.distributed import join
    from forge.training.settings import OptimizerSettings
    from forge.training.trainer import PolicyTrainer
    from forge.types import Episode, Sampling

    torch.set_num_threads(2)
    clock = Clock()
    algo = cfg.grpo
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    dataset = load_data(tokenizer, seed=cfg.seed, **cfg.dataset)
    score = load_reward(cfg.reward.functions[0])
    loss = cfg.load_algorithm()
    optimizer = OptimizerSettings(**cfg.training.optimizer_settings())
    trainer = PolicyTrainer(cfg.model, join(), optimizer, temperature=algo.temperature, **cfg.training.trainer())
    with EmbeddedEngine(cfg.model, slots=cfg.generator.slots) as engine:
        for step in range(cfg.training.steps):
            samples = [next(dataset) for _ in range(cfg.training.batch_size)]
            settings = [
                Sampling(algo.n_samples, algo.max_tokens, algo.temperature, seed=1_000_003 * sample.prompt.index)
                for sample in samples
            ]
            futures = [
                engine.submit(sample.prompt.token_ids, sampling)
                for sample, sampling in zip(samples, settings, strict=True)
            ]
            episodes: list[Episode] = []
            rewards: list[float] = []
            for sample, future in zip(samples, futures, strict=True):
                group = future.result()
                texts = tokenizer.batch_decode([c.token_ids for c in group], skip_special_tokens=True)
                scores = [score(sample.prompt.text, text, sample.target) for text in texts]
                rewards += scores
                for completion, reward, advantage in zip(group, scores, group_relative(scores), strict=True):
                    episode = Episode(completion, reward)
                    episode.advantage = advantage
                    episodes.append(episode)
            trainer.train_step(skip_idle(pack(episodes, **cfg.shares(loss)), loss), loss)
            engine.update_weights(trainer.export_weights(), step + 1).result()
            clock.tick()
            clock.rewards.append(statistics.mean(rewards))
    return clock


def tail(args: argparse.Namespace) -> int:
    """The last steps of an asynchronous run have less to generate: its rollouts are ahead."""
    return args.max_policy_age + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn, each with another seed")
    parser.add_argument("--max-policy-age", type=int, default=1, help="of the real system; 0 is lock-step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", choices=["real", "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARMUP + tail(args):
        parser.error(f"--steps must be more than {WARMUP + tail(args)}: those are not measured")
    if args.side is not None:
        (recipe if args.side == "real" else bare)(configuration(args.folder, args)).show(tail(args))
        return
    threads = {"real": 1, "bare": 2}
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for number in range(args.rounds):
            options = {"steps": args.steps, "seed": args.seed + number, "max-policy-age": args.max_policy_age}
            rounds.append(
                {side: measure(sys.executable, __file__, side, Path(name), n, **options) for side, n in threads.items()}
            )
    print("| side | seconds a step | CPU-seconds a step | reward, first and last step |\n|---|---|---|---|")
    for side in threads:
        wall, cpu = (statistics.median(r[side][what] for r in rounds) for what in ("wall", "cpu"))
        first, last = (statistics.median(r[side]["rewards"][at] for r in rounds) for at in (0, -1))
        print(f"| {side} | {wall:.2f} | {cpu:.2f} | {first:.2f}, {last:.2f} |")
    for what, unit in (("wall", "Seconds"), ("cpu", "CPU-seconds")):
        ratios = sorted(r["real"][what] / r["bare"][what] for r in rounds)
        print(f"\n{unit}, real to bare: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
