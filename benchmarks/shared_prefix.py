"""A training step on groups of samples that share their prompt: computed once, against repeated for every sample.

    python benchmarks/shared_prefix.py                       # the whole table
    python benchmarks/shared_prefix.py --prompts 512 --samples 16

Both sides run in turn, each in a process of its own: median CPU-seconds of a step (forward and backward), their
ratio, and peak memory above that of the loaded model.
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
from functools import partial

SIZES = {"3M": (256, 4), "25M": (512, 8), "135M": (576, 30)}  # hidden size, layers


def one_side(size: str, prompt: int, samples: int, answer: int, groups: int, shared: bool, steps: int) -> dict:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from forge.data.packing import split
    from forge.data.prefixes import find_prefixes
    from forge.training import policy as module
    from forge.training.policy import Policy
    from forge.types import Batch

    if not shared:
        for where in (module, sys.modules["forge.data.packing"]):
            where.find_prefixes = partial(find_prefixes, saved=10**9)  # type: ignore[attr-defined]
    hidden, layers = SIZES[size]
    vocabulary = 49152 if size == "135M" else 4096
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        head_dim=64,
        intermediate_size=hidden * 8 // 3,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    policy = Policy(LlamaForCausalLM(config))
    random = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        trunk = random.integers(0, vocabulary, prompt)
        rows += [np.concatenate([trunk, random.integers(0, vocabulary, answer)]) for _ in range(samples)]
    mask = np.concatenate([np.arange(len(row)) >= prompt for row in rows])
    zeros = np.zeros(len(mask), np.float32)
    lengths = np.array([len(row) for row in rows])
    batch = Batch(np.concatenate(rows), lengths, mask, zeros, zeros, zeros, mask / np.float32(mask.sum()))
    ((micro, *rest),) = split(batch, ranks=1, max_tokens=10**9)
    assert not rest
    weights = torch.from_numpy(micro.weights[micro.mask])
    before, times, losses = _peak(), [], []
    for _ in range(steps):
        policy.zero_grad()
        start = time.process_time()
        scores = policy(micro)
        loss = -(weights * scores.logprobs).sum()
        loss.backward()
        times.append(time.process_time() - start)
        losses.append(float(loss))
    norm = torch.stack([p.grad.double().norm() for p in policy.parameters()]).norm()
    return {
        "cpu": statistics.median(times[1:] or times),
        "memory": _peak() - before,
        "tokens": len(find_prefixes(micro.tokens, micro.lengths, 32 if shared else 10**9).source),
        "loss": losses[-1],
        "norm": float(norm),
    }


def _peak() -> float:
    """Of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(*arguments: object) -> dict:
    call = [sys.executable, __file__, "--side", json.dumps(arguments)]
    found = subprocess.run(call, capture_output=True, text=True, check=False)
    if found.returncode:
        return {"failed": found.stderr.strip().splitlines()[-1] if found.stderr else f"exit {found.returncode}"}
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(one_side(*json.loads(args.side))))
        return
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{args.size}, {args.groups} group(s), answers of {args.answer} tokens, {capability}, ")
    print(f"{os.environ.get('OMP_NUM_THREADS', 'default')} thread(s); CPU-seconds of a step, peak memory in GB")
    print("prompt samples   tokens repeated/shared      CPU repeated  shared  ratio   memory repeated  shared")
    for prompt in args.prompts:
        for samples in args.samples:
            sides: dict[bool, list[dict]] = {False: [], True: []}
            for _ in range(args.rounds):
                for shared in (False, True):
                    case = (args.size, prompt, samples, args.answer, args.groups, shared, args.steps)
                    sides[shared].append(measure(*case))
            failed = [each["failed"] for side in sides.values() for each in side if "failed" in each]
            if failed:
                print(f"{prompt:6} {samples:7}   failed: {failed[0]}")
                continue
            a, b = (
                {key: statistics.median(each[key] for each in sides[shared]) for key in sides[shared][0]}
                for shared in (False, True)
            )
            assert abs(a["loss"] - b["loss"]) < 1e-5 * abs(a["loss"]), (a, b)
            assert abs(a["norm"] - b["norm"]) < 1e-4 * a["norm"], (a, b)
            print(
                f"{prompt:6} {samples:7}   {a['tokens']:15,}/{b['tokens']:<9,} {a['cpu']:14.2f} {b['cpu']:7.2f} "
                f"{a['cpu'] / b['cpu']:6.2f} {a['memory']:17.2f} {b['memory']:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
