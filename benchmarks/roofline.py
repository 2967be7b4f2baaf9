"""Where the time of a GRPO step goes: arithmetic reached in each phase against the machine's peak, on one thread.

    python benchmarks/roofline.py --models 3.2M 25M

The peak is the best float32 matrix product of 1,024 rows and columns in the same run, by oneDNN or by torch's default.
Operations of a forward pass: 2 a weight of a matrix and token, and 4 * layers * heads * head size a token and token
attended to (Kaplan et al. 2020, arXiv:2001.08361); a backward pass has twice as many. The share of matrix products,
attention and all other operators is by torch.profiler, in a pass of its own; the rest is Python and dispatch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from engine import MODELS, VOCAB, build
from processor import rates, seconds
from sides import as_a_component
from torch.profiler import ProfilerActivity, profile

from forge.algorithms import SFTLoss
from forge.data.packing import pack
from forge.engines.decoder import Decoder
from forge.engines.weights import Weights, load_config, read_checkpoint
from forge.training.distributed import join
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Completion, Episode

PRODUCTS = ("addmm", "::mm", "linear", "matmul", "mkldnn")
ATTENTION = ("bmm", "scaled_dot", "softmax", "flash")


def shares(call: Callable[[], object]) -> dict[str, float]:
    """Of the time of a call: matrix products, attention, other operators; what is missing to 1 is Python."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        start = time.process_time()
        call()
        whole = (time.process_time() - start) * 1e6
    found = {"products": 0.0, "attention": 0.0, "other": 0.0}
    for event in profiled.key_averages():
        kind = "attention" if any(name in event.key for name in ATTENTION) else "other"
        if kind == "other" and any(name in event.key for name in PRODUCTS):
            kind = "products"
        found[kind] += event.self_cpu_time_total / whole
    return found


def phases(name: str, args: argparse.Namespace) -> dict[str, tuple[float, Callable[[], object]]]:
    """Operations of a call of each phase, and the call."""
    hidden, inner, layers, heads, kv_heads = MODELS[name]
    size = hidden // heads
    block = hidden * size * (heads + 2 * kv_heads) + heads * size * hidden + 3 * hidden * inner
    matrices, attended = layers * block, 4 * layers * heads * size
    head = hidden * VOCAB
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        build(name, folder)
        config = load_config(Path(folder))
        checkpoint = dict(read_checkpoint(Path(folder)))
        trainer = PolicyTrainer(folder, join(), OptimizerSettings(learning_rate=1e-5), seq_len=10**6)
    weights = Weights(config, checkpoint.items(), torch.float32, torch.device("cpu"), 0)
    longest = args.prompt + args.tokens
    decoder = Decoder(config, weights, args.batch, longest, torch.float32, torch.device("cpu"))
    prompts = random.integers(0, VOCAB, (args.batch, args.prompt)).tolist()
    decoder.cache.reserve(longest, 0)
    tokens = torch.zeros(args.batch, dtype=torch.long)
    at = args.prompt + args.tokens // 2
    length = -(-at // decoder.granule) * decoder.granule

    def decode() -> None:
        with torch.inference_mode():
            decoder.decode(tokens, torch.full((args.batch,), at - 1), length)

    def prefill() -> None:
        with torch.inference_mode():
            decoder.prefill(prompts, range(args.batch))

    episodes = []
    for prompt in random.integers(0, VOCAB, (args.batch, args.prompt)).tolist():  # nothing is shared
        answer = random.integers(0, VOCAB, args.tokens).tolist()
        completion = Completion(prompt_ids=tuple(prompt), token_ids=answer, logprobs=[0.0] * args.tokens)
        episode = Episode(completion, 1.0)
        episode.advantage = 1.0
        episodes.append(episode)
    batch, loss = pack(episodes), SFTLoss()
    policy, count = trainer.policy, args.batch * longest
    forward = (
        count * 2 * matrices + args.batch * args.tokens * 2 * head + args.batch * attended * longest * (longest + 1) / 2
    )

    def scores() -> None:
        with torch.no_grad():
            policy(batch)

    prompt_attended = args.batch * attended * args.prompt * (args.prompt + 1) / 2
    return {
        "prefill": (args.batch * args.prompt * 2 * matrices + prompt_attended, prefill),
        "decode": (args.batch * (2 * (matrices + head) + attended * at), decode),
        "scores": (forward, scores),
        # The head's logits are computed once more in the backward pass.
        "training step": (3 * forward + args.batch * args.tokens * 2 * head, partial(trainer.train_step, batch, loss)),
        "weights to the engine": (
            0.0,
            lambda: Weights(config, checkpoint.items(), torch.float32, torch.device("cpu"), 0),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["3.2M", "25M"])
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    best = max(rates().values())
    print(
        f"{torch.backends.cpu.get_cpu_capability()}, one thread, peak {best / 1e9:.0f} GFLOP/s; {args.batch} sequences "
        f"of {args.prompt} + {args.tokens} tokens\n"
    )
    print("| model | phase | CPU-ms | GFLOP/s | of the peak | products | attention | other operators | Python |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.models:
        for phase, (operations, call) in phases(name, args).items():
            taken, of = seconds(call, args.repeats), shares(call)
            rest = max(0.0, 1 - sum(of.values()))
            rate = f"{operations / taken / 1e9:.0f} | {operations / taken / best:.0%}" if operations else "– | –"
            parts = " | ".join(f"{share:.0%}" for share in (*of.values(), rest))
            print(f"| {name} | {phase} | {taken * 1e3:.1f} | {rate} | {parts} |", flush=True)


if __name__ == "__main__":
    as_a_component()
    main()
