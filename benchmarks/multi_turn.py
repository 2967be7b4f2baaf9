"""Episodes of several turns with the prefix cache of the embedded engine, and without it.

    python benchmarks/multi_turn.py
    python benchmarks/multi_turn.py --size 135M --turns 4 16

Both sides run in turn, each in a process of its own: prompt tokens that were computed, and CPU-seconds, per episode
(medians of rounds). Both sides must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = {"3M": (256, 4, 4096), "25M": (512, 8, 4096), "135M": (576, 30, 49152)}  # hidden size, layers, vocabulary


def one_side(size: str, turns: int, episodes: int, first: int, answer: int, observed: int, cached: bool) -> dict:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from forge.engines import EmbeddedEngine
    from forge.types import Sampling

    hidden, layers, vocabulary = SIZES[size]
    longest = first + turns * (answer + observed)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        head_dim=64,
        intermediate_size=hidden * 8 // 3,
        vocab_size=vocabulary,
        max_position_embeddings=longest + 1,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        # Room for all keys and values of all prompts.
        room = 8 * layers * max(1, hidden // 192) * 64 * longest * episodes / 1e6
        engine = EmbeddedEngine(
            folder, slots=episodes, max_seq_len=longest + 1, device="cpu", prefix_cache_mb=room if cached else 0
        )
    with engine:
        prompts = [random.integers(0, vocabulary, first).tolist() for _ in range(episodes)]
        start = time.process_time()
        for turn in range(turns):
            asked = [
                engine.submit(prompt, Sampling(max_tokens=answer, seed=turn * episodes + i))
                for i, prompt in enumerate(prompts)
            ]
            for prompt, future in zip(prompts, asked, strict=True):
                (completion,) = future.result()
                prompt += [*completion.token_ids, *random.integers(0, vocabulary, observed).tolist()]
        cpu = (time.process_time() - start) / episodes
        return {"cpu": cpu, "prefilled": engine.stats()["prefilled_tokens"] / episodes, "sum": sum(map(sum, prompts))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--episodes", type=int, default=8, help="played at the same time")
    parser.add_argument("--first", type=int, default=128, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of the policy in a turn")
    parser.add_argument("--observed", type=int, default=96, help="tokens of the environment in a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(one_side(*json.loads(args.side))))
        return
    import torch

    print(
        f"{args.size}, {args.episodes} episodes at once, first prompt {args.first}, turns of {args.answer} + "
        f"{args.observed} tokens, {torch.backends.cpu.get_cpu_capability()}, "
        f"{os.environ.get('OMP_NUM_THREADS', 'default')} thread(s); per episode"
    )
    print("turns   prompt tokens computed: without   with     CPU-seconds: without   with   ratio")
    for turns in args.turns:
        sides: dict[bool, list[dict]] = {False: [], True: []}
        for _ in range(args.rounds):
            for cached in (False, True):
                case = json.dumps([args.size, turns, args.episodes, args.first, args.answer, args.observed, cached])
                call = [sys.executable, __file__, "--side", case]
                done = subprocess.run(call, capture_output=True, text=True, check=True)
                sides[cached].append(json.loads(done.stdout.splitlines()[-1]))
        assert len({each["sum"] for side in sides.values() for each in side}) == 1
        a, b = ({key: statistics.median(s[key] for s in sides[cached]) for key in sides[cached][0]} for cached in sides)
        print(
            f"{turns:5} {a['prefilled']:33,.0f} {b['prefilled']:6,.0f} {a['cpu']:24.3f} {b['cpu']:6.3f} "
            f"{a['cpu'] / b['cpu']:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
