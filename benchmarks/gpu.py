"""What one GPU does: correctness of both engines and of the trainer in bfloat16, tokens a second, model-FLOPs
utilisation, weight sync, and the quickstart's GRPO with trainer and generator taking turns on the device.

    python benchmarks/gpu.py                          # on a GPU: a 0.5B-class model, random weights
    python benchmarks/gpu.py --size tiny --quick      # anywhere: the same path, figures without meaning

The last part goes on from the quickstart's warm-up, runs/quickstart-warmup/model, and makes it where it is missing.
Each part prints its lines of one table; one that fails says so, and the rest go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from forge.data.packing import pack
from forge.data.tokenizer import PRINTABLE, character_tokenizer
from forge.engines import load_engine
from forge.losses import GRPOLoss
from forge.store import VersionStore
from forge.training.distributed import join
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Completion, Episode, Sampling

SIZES: dict[str, dict[str, int]] = {
    # Qwen2.5-0.5B's shape with heads of 64.
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
# Dense bfloat16 multiply-adds a second, from the makers' data sheets.
PEAK = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12}
WARMUP = Path("runs/quickstart-warmup/model")


def build(size: str, folder: Path) -> int:
    """Write a model with random weights and some tokenizer; its number of parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES[size], max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    character_tokenizer(PRINTABLE).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def engines(args: argparse.Namespace) -> list[str]:
    """Those that can be had here."""
    return ["embedded", *(["vllm"] if importlib.util.find_spec("vllm") else [])]


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(5, vocab, (count, length)).tolist()


def generated(engine: Any, asked: list[list[int]], tokens: int) -> list[Completion]:
    futures = [engine.submit(prompt, Sampling(max_tokens=tokens, seed=i)) for i, prompt in enumerate(asked)]
    return [future.result(timeout=1800)[0] for future in futures]


def correctness(args: argparse.Namespace, folder: Path, dtype: str) -> Iterator[tuple[str, str]]:
    """How far the log-probabilities of sampled tokens are from those of transformers in float32."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(args.device).eval()
    asked = prompts(8, 32, SIZES[args.size]["vocab_size"])

    @torch.no_grad()
    def oracle(completion: Completion) -> np.ndarray:
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]], device=args.device)
        scores = reference(ids).logits[0, :-1].float().log_softmax(-1)
        return scores.gather(1, ids[0, 1:, None])[-len(completion.token_ids) :, 0].cpu().numpy()

    drawn: list[Completion] = []
    for name in engines(args):
        engine = load_engine(name, folder, slots=8, max_seq_len=256, dtype=dtype)
        try:
            drawn = generated(engine, asked, 64)
        finally:
            engine.close()
        apart = np.concatenate([np.abs(np.array(c.logprobs) - oracle(c)) for c in drawn])
        yield f"{name}, {dtype}: log-probabilities from float32", f"mean {apart.mean():.1e}, largest {apart.max():.1e}"
    trainer = PolicyTrainer(folder, join(), OptimizerSettings(), seq_len=4096, dtype=dtype)
    batch = pack([Episode(c, 0.0, advantage=1.0) for c in drawn])
    apart = np.abs(trainer.logprobs(batch)[batch.mask] - np.concatenate([oracle(c) for c in drawn]))
    yield f"trainer, {dtype}: log-probabilities from float32", f"mean {apart.mean():.1e}, largest {apart.max():.1e}"


def generation(args: argparse.Namespace, folder: Path, dtype: str) -> Iterator[tuple[str, str]]:
    """Tokens a second of each engine."""
    tokens = 16 if args.quick else 512
    for name in engines(args):
        for batch in (4, 8) if args.quick else (64, 256):
            engine = load_engine(name, folder, slots=batch, max_seq_len=1024, dtype=dtype)
            try:
                asked = prompts(batch, 32, SIZES[args.size]["vocab_size"])
                generated(engine, asked, 8)
                taken = []
                for _ in range(3):
                    start = time.perf_counter()
                    generated(engine, asked, tokens)
                    taken.append(time.perf_counter() - start)
            finally:
                engine.close()
            rate = batch * tokens / statistics.median(taken)
            yield f"{name}, batch {batch}: generated tokens/s", f"{rate:,.0f}"


def training(args: argparse.Namespace, folder: Path, dtype: str) -> Iterator[tuple[str, str]]:
    """Tokens a second of a GRPO step, and their share of the device's peak."""
    sizes, length = SIZES[args.size], 128 if args.quick else 2048
    trainer = PolicyTrainer(folder, join(), OptimizerSettings(), seq_len=4 * length, dtype=dtype)
    episodes = [
        Episode(prompt_ids=ids[:16], response_ids=ids[16:], reward=1.0, advantage=float(i % 2) - 0.5)
        for i, ids in enumerate(prompts(8 if args.quick else 32, length, sizes["vocab_size"]))
    ]
    batch, loss, taken = pack(episodes), GRPOLoss(), []
    trainer.train_step(batch, loss)
    for _ in range(3):
        start = time.perf_counter()
        trainer.train_step(batch, loss)  # its metrics are read, so the device has finished
        taken.append(time.perf_counter() - start)
    rate = len(batch.tokens) / statistics.median(taken)
    yield "trainer: tokens/s", f"{rate:,.0f}"
    # Chowdhery et al. 2022 (PaLM), appendix B; a causal token attends to half of its sequence.
    attention = sizes["num_hidden_layers"] * sizes["num_attention_heads"] * sizes["head_dim"] * length / 2
    flops = 6 * args.parameters + 12 * attention
    peak = next((peak for name, peak in PEAK.items() if name in args.name), None)
    yield "trainer: model-FLOPs utilisation", f"{rate * flops / peak:.1%}" if peak else "peak of this device not known"
    if args.device.type != "cpu":
        yield "trainer: most memory", f"{torch.accelerator.max_memory_allocated() / 2**30:.1f} GiB"


def weight_sync(args: argparse.Namespace, folder: Path, dtype: str) -> Iterator[tuple[str, str]]:
    """Seconds from a trainer's weights to an engine that decodes with them, through the store."""
    trainer = PolicyTrainer(folder, join(), OptimizerSettings(), dtype=dtype)
    store, numbers = VersionStore.create(), itertools.count(1)
    try:
        for name in engines(args):
            engine = load_engine(name, folder, slots=8, max_seq_len=256, dtype=dtype)
            put, taken = [], []
            try:
                for version in itertools.islice(numbers, 3):
                    start = time.perf_counter()
                    store.put("policy", trainer.weights(), version)
                    middle = time.perf_counter()
                    with store.open("policy", version) as snapshot:
                        engine.update_weights(snapshot.tensors(), version, snapshot.digest).result(timeout=600)
                    put.append(middle - start)
                    taken.append(time.perf_counter() - middle)
            finally:
                engine.close()
            seconds = [statistics.median(times) for times in (put, taken)]
            yield f"{name}: weights put / taken over, s", " / ".join(f"{each:.2f}" for each in seconds)
    finally:
        store.close()


def colocated(args: argparse.Namespace, folder: Path, dtype: str) -> Iterator[tuple[str, str]]:
    """The quickstart, lock-step, with one device for trainer and generator."""
    if not WARMUP.exists():
        subprocess.run([sys.executable, "-m", "apps.sft.main", "--config", "apps/sft/tiny.yaml"], check=True)
    gpus = str(args.device.type != "cpu").lower()
    options = {
        "colocated": "true",
        "async.max_policy_age": "0",
        "services.generator.num_replicas": "1",
        "services.generator.with_gpus": gpus,
        "services.trainer.with_gpus": gpus,
        "run.name": "gpu-colocated",
        **({"training.steps": "12", "eval.every": "6", "checkpoint.every": "0"} if args.quick else {}),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/tiny.yaml", *words], check=True)
    seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in Path("runs/gpu-colocated/metrics.jsonl").read_text().splitlines()]
    found = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    yield "colocated quickstart: held-out accuracy", f"{found[0]:.3f} -> {found[-1]:.3f} in {seconds:.0f} s"


PARTS: dict[str, Callable[..., Iterator[tuple[str, str]]]] = {
    part.__name__: part for part in (correctness, generation, training, weight_sync, colocated)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="few tokens and steps")
    args = parser.parse_args()
    args.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    args.name = "CPU" if args.device.type == "cpu" else torch.get_device_module(args.device).get_device_name()
    dtype = "float32" if args.device.type == "cpu" else "bfloat16"
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        args.parameters = build(args.size, Path(folder))
        print(f"| {args.name}, torch {torch.__version__}, {args.size} ({args.parameters / 1e6:.0f}M) | |\n|---|---|")
        for name in args.parts:
            try:
                for what, figure in PARTS[name](args, Path(folder), dtype):
                    print(f"| {what} | {figure} |", flush=True)
            except Exception:
                traceback.print_exc()
                print(f"| {name} | failed |", flush=True)
                failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
