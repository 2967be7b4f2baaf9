"""How fast verifiers score: encoders of several sizes, and an ensemble against the model that was distilled from it.

    GOMP_SPINCOUNT=2000 python benchmarks/verifiers.py --ensemble runs/weaver-rl/ensemble0

Encoders are random BERT classifiers of four layers on rows of 24 tokens; two threads, 128 groups of 32 responses at
once. Of an ensemble and its distilled verifier, responses that the ensemble was made from are scored, without a cache.
Responses a second, and a CPU-second of all threads; the median of five rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

from forge.models import quiet_loading
from forge.models.tokenizer import character_tokenizer
from forge.rewards import Verifier
from forge_verifiers import RewardModel
from forge_weaver import Distilled, load_ensemble, read_problems

SIZES = [(64, "float32"), (128, "float32"), (192, "float32"), (256, "float32"), (256, "bfloat16"), (384, "bfloat16")]

Group = tuple[str, Sequence[str]]


async def speed(verifier: Verifier, groups: list[Group], rounds: int = 5) -> tuple[float, float]:
    """Responses a second of the wall, and a CPU-second."""
    count = sum(len(responses) for _, responses in groups)
    await asyncio.gather(*(verifier.score(*group) for group in groups[:16]))
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(verifier.score(*group) for group in groups))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return count / statistics.median(walls), count / statistics.median(cpus)


async def encoders() -> None:
    tokenizer, rng = character_tokenizer(), random.Random(0)

    def word() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=11))

    groups = [(f"{word()}>", [word() for _ in range(32)]) for _ in range(128)]
    print("| parameters | dtype | responses/s | a CPU-second |\n|---|---|---|---|")
    for hidden, dtype in SIZES:
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            num_hidden_layers=4,
            num_attention_heads=hidden // 32,
            intermediate_size=4 * hidden,
            max_position_embeddings=128,
            num_labels=1,
            pad_token_id=tokenizer.pad_token_id,
        )
        with tempfile.TemporaryDirectory() as folder, quiet_loading():
            model = BertForSequenceClassification(config)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            verifier = RewardModel(folder, dtype=dtype)
        wall, cpu = await speed(verifier, groups)
        print(f"| {model.num_parameters() / 1e6:.1f}M | {dtype} | {wall:.0f} | {cpu:.0f} |", flush=True)
        await verifier.close()


async def saved(folder: Path, problems: int) -> None:
    verifiers, _ = load_ensemble(folder)
    groups = [(p.prompt, p.responses) for p in islice(read_problems(folder / "responses.jsonl"), problems)]
    with quiet_loading():
        sides = {"ensemble": verifiers.panel(), "distilled": Distilled(str(folder / "distilled")).setup()}
    print("| verifier | responses/s | a CPU-second |\n|---|---|---|")
    cpus = []
    for name, verifier in sides.items():
        wall, cpu = await speed(verifier, groups)
        cpus.append(cpu)
        print(f"| {name} of {len(verifier.names)} | {wall:.0f} | {cpu:.0f} |", flush=True)
        await verifier.close()
    print(f"\nThe distilled verifier takes {cpus[0] / cpus[1]:.1%} of the ensemble's CPU time.")


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the ensemble's rules are in apps/
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ensemble", type=Path, help="folder that apps/weaver left, with a distilled verifier")
    parser.add_argument("--problems", type=int, default=250)
    args = parser.parse_args()
    torch.set_num_threads(2)
    asyncio.run(encoders())
    if args.ensemble is not None:
        print()
        asyncio.run(saved(args.ensemble, args.problems))


if __name__ == "__main__":
    main()
