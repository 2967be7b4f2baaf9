"""The embedded engine against transformers `generate`: tokens per CPU-second on one thread, both sides in one run.

Random weights, float32, sampling at temperature 1. Three loads: `fixed` (every sequence the same length), `skewed`
(lengths drawn from a log-normal; `generate` runs a batch to its longest sequence, only wanted tokens count) and
`groups` (8 samples a prompt). `generate` returns tokens only, the engine their log-probabilities as well. Both sides
run in the environment of a generator's process (one thread, the allocator's settings), once before they are measured.

    python benchmarks/engine.py --models 3.2M 25M --batches 16 64 256
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from processor import described
from sides import as_a_component
from transformers import AutoModelForCausalLM, Qwen3Config

from forge.engines import EmbeddedEngine
from forge.types import Sampling

# hidden size, intermediate size, layers, heads, key-value heads
MODELS = {
    "1.0M": (128, 384, 6, 4, 2),
    "3.2M": (256, 768, 4, 4, 2),
    "25M": (512, 1536, 8, 8, 4),
    "135M": (576, 1536, 30, 9, 3),
}
VOCAB = 260  # token ids of prompts; also the vocabulary, but for the largest model
GROUP = 8


def build(name: str, folder: str) -> None:
    hidden, inner, layers, heads, kv_heads = MODELS[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152 if name == "135M" else VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def load(kind: str, batch: int, args: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Prompts and the number of tokens wanted for each: one batch, or for `skewed` several in a row."""
    rng = np.random.default_rng(0)
    count = batch * args.rounds if kind == "skewed" else batch
    prompts = rng.integers(0, VOCAB, (count, args.prompt)).tolist()
    if kind == "groups":
        prompts = [prompt for prompt in prompts[: batch // GROUP] for _ in range(GROUP)]
    wanted = [args.tokens] * count
    if kind == "skewed":
        drawn = rng.lognormal(np.log(args.tokens * 0.6), 0.7, count)
        wanted = np.clip(drawn, 4, 2.5 * args.tokens).astype(int).tolist()
    return prompts, wanted


def with_engine(engine: EmbeddedEngine, kind: str, prompts: list[list[int]], wanted: list[int]) -> None:
    n = GROUP if kind == "groups" else 1
    futures = [
        engine.submit(prompt, Sampling(n=n, max_tokens=tokens, seed=i))
        for i, (prompt, tokens) in enumerate(zip(prompts[::n], wanted[::n], strict=True))
    ]
    drawn = sum(len(completion.token_ids) for future in futures for completion in future.result())
    assert drawn == sum(wanted)


def with_generate(model: torch.nn.Module, batch: int, prompts: list[list[int]], wanted: list[int]) -> None:
    for at in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[at : at + batch])
        longest = max(wanted[at : at + batch])
        with torch.inference_mode():
            out = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=longest,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + longest


def cpu_seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["3.2M", "25M"])
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument(
        "--loads", nargs="+", choices=["fixed", "skewed", "groups"], default=["fixed", "skewed", "groups"]
    )
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens; for skewed loads, about their mean")
    parser.add_argument("--rounds", type=int, default=2, help="batches of a skewed load")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported, as in a component's process: a collection of it takes a tenth of a second
    print(f"{described()}\n")
    print("| model | load | batch | engine tok/CPU-s | generate tok/CPU-s | ratio |\n|---|---|---|---|---|---|")
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            build(name, folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for kind in args.loads:
                for batch in args.batches:
                    prompts, wanted = load(kind, batch, args)
                    times: tuple[list[float], list[float]] = ([], [])
                    with EmbeddedEngine(folder, slots=batch, device="cpu") as engine:
                        sides = (
                            lambda e=engine, k=kind, p=prompts, w=wanted: with_engine(e, k, p, w),
                            lambda m=model, b=batch, p=prompts, w=wanted: with_generate(m, b, p, w),
                        )
                        for repeat in range(args.repeats + 1):
                            for side, taken in zip(sides, times, strict=True):
                                cpu = cpu_seconds(side)
                                if repeat:  # the first prepares kernels and takes memory
                                    taken.append(cpu)
                    ours, theirs = (sum(wanted) / statistics.median(taken) for taken in times)
                    print(
                        f"| {name} | {kind} | {batch} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |", flush=True
                    )


if __name__ == "__main__":
    as_a_component()
    main()
