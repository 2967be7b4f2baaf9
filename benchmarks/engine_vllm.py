"""The embedded engine against vLLM on a CPU: tokens per CPU-second, and time to the first token.

    python benchmarks/engine_vllm.py --vllm PYTHON_WITH_VLLM --models 135M --batches 16 64

Random weights, sampling at temperature 1 with log-probabilities on both sides, every sequence of the same length, both
in the environment of a generator's process (one thread, the allocator's settings). vLLM runs in its own process (`LLM`,
without compilation) and in the environment of `make test-vllm`. Both sides take turns. The time to the first token is
of one request to an idle engine, and the median of a batch of requests that arrive at once, each with a prompt of its
own.
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
from collections.abc import Callable

import numpy as np
from engine import MODELS, build, load

from forge.runtime.controller.processes import library_environment

FIRST = 4  # tokens of a request whose first is timed


def embedded(folder: str, args: argparse.Namespace) -> dict[str, float]:
    import torch

    from forge.engines import EmbeddedEngine
    from forge.types import Sampling

    torch.set_num_threads(1)
    with EmbeddedEngine(folder, slots=args.batch, device="cpu", dtype=args.dtype) as engine:

        def generate(prompts: list[list[int]], tokens: int) -> int:
            futures = [engine.submit(p, Sampling(max_tokens=tokens, seed=i)) for i, p in enumerate(prompts)]
            return sum(len(completion.token_ids) for future in futures for completion in future.result())

        def first_tokens(prompts: list[list[int]]) -> list[float]:
            arrived: dict[int, float] = {}
            begin = time.perf_counter()
            futures = [
                engine.submit(
                    prompt,
                    Sampling(max_tokens=FIRST, seed=i),
                    listener=lambda _, __, i=i: arrived.setdefault(i, time.perf_counter() - begin),
                )
                for i, prompt in enumerate(prompts)
            ]
            for future in futures:
                future.result()
            return list(arrived.values())

        return measure(generate, first_tokens, args)


def vllm(folder: str, args: argparse.Namespace) -> dict[str, float]:
    for name, value in (
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=args.dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=args.batch,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], tokens: int) -> int:
        how = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    def first_tokens(prompts: list[list[int]]) -> list[float]:
        arrived: dict[str, float] = {}
        engine, begin = llm.llm_engine, time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, SamplingParams(max_tokens=FIRST, ignore_eos=True))
        while engine.has_unfinished_requests():
            for output in engine.step():
                arrived.setdefault(output.request_id, time.perf_counter() - begin)
        return list(arrived.values())

    return measure(generate, first_tokens, args)


def measure(
    generate: Callable[[list[list[int]], int], int],
    first_tokens: Callable[[list[list[int]]], list[float]],
    args: argparse.Namespace,
) -> dict[str, float]:
    """Tokens per CPU-second of a batch, and the median milliseconds to the first token, of one request and of a
    batch."""
    prompts, _ = load("fixed", args.batch, args)
    rng = np.random.default_rng(1)
    generate(prompts, 2)  # kernels of these shapes
    rates = []
    for _ in range(args.repeats):
        begin = time.process_time()
        drawn = generate(prompts, args.tokens)
        assert drawn == args.batch * args.tokens
        rates.append(drawn / (time.process_time() - begin))
    found = {"rate": statistics.median(rates)}
    for name, count in (("alone", 1), ("together", args.batch)):
        first = []
        for turn in range(args.repeats + 1):
            arrived = first_tokens(rng.integers(0, 256, (count, args.first_prompt)).tolist())
            assert len(arrived) == count
            if turn:  # the first prepares kernels
                first += arrived
        found[name] = 1e3 * statistics.median(first)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["135M"])
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of both sides")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens of the batch")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--first-prompt", type=int, default=256, help="prompt tokens for the time to the first token")
    parser.add_argument("--repeats", type=int, default=3, help="batches in a process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, in turn")
    parser.add_argument("--side", choices=["embedded", "vllm"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        found = (embedded if args.side == "embedded" else vllm)(args.folder, args)
        print(json.dumps(found))
        return
    env = os.environ | library_environment()
    print("| model | batch | embedded tok/CPU-s | vLLM | ratio | first token of one, ms | vLLM | ratio ", end="")
    print("| first token of a batch, ms | vLLM | ratio |\n" + "|---" * 11 + "|")
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            build(name, folder)
            for batch in args.batches:
                sides: dict[str, list[dict[str, float]]] = {"embedded": [], "vllm": []}
                for _ in range(args.rounds):
                    for side, results in sides.items():
                        call = [sys.executable if side == "embedded" else args.vllm, __file__, *sys.argv[1:]]
                        call += ["--side", side, "--folder", folder, "--batch", str(batch)]
                        output = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True, env=env)
                        results.append(json.loads(output.stdout.splitlines()[-1]))
                cells = []
                for what in ("rate", "alone", "together"):
                    ours, theirs = (statistics.median(one[what] for one in results) for results in sides.values())
                    cells.append(f"{ours:.0f} | {theirs:.0f} | {ours / theirs:.2f}")
                print(f"| {name} | {batch} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
