"""Optimisers and dtypes of their state on the quickstart's warm-up task: words to spell backwards.

    python benchmarks/optimizers.py

A small Qwen3 learns from scratch at a learning rate of 3e-3, then the model that AdamW left continues at 1e-5. Prints
the table of docs/parallelism.md: held-out loss in nats per token. Without torchao its row is left out.
"""

from __future__ import annotations

import string
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from forge.data.packing import pack
from forge.losses import SFTLoss
from forge.models.tokenizer import character_tokenizer
from forge.training import checkpoint
from forge.training.distributed import join
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Batch, Episode

TOKENIZER = character_tokenizer(string.ascii_lowercase + ">")
HALF = {"dtype": "bfloat16", "weights_dtype": "bfloat16"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "`adamw`": ({}, {}),
    "`adamw`, `optimizer_dtype: bfloat16`": ({"optimizer_dtype": "bfloat16"}, {}),
    "`adamw`, `weights_dtype: bfloat16`": ({}, HALF),
    "`adamw`, `weights_dtype: bfloat16`, `optimizer_dtype: float32`": ({"optimizer_dtype": "float32"}, HALF),
    "`muon`": ({"optimizer": "muon"}, {}),
    "`muon`, `weights_dtype: bfloat16`, `optimizer_dtype: float32`": (
        {"optimizer": "muon", "optimizer_dtype": "float32"},
        HALF,
    ),
    "`adamw8bit`": ({"optimizer": "adamw8bit"}, {}),
}


def batch(seed: int, rows: int = 64) -> Batch:
    random, episodes = Random(seed), []
    for _ in range(rows):
        word = "".join(random.choices(string.ascii_lowercase, k=random.randint(3, 7)))
        answer = [*TOKENIZER(word[::-1]).input_ids, TOKENIZER.eos_token_id]
        unknown, versions = [float("nan")] * len(answer), [-1] * len(answer)
        prompt = TOKENIZER(f"{word}>").input_ids
        texts = {"prompt_ids": prompt, "response_ids": answer, "logprobs": unknown, "versions": versions}
        episodes.append(Episode(**texts, advantage=1.0))
    return pack(episodes)


def train(model: Path, case: str, rate: float, steps: int, first: int, left: Path | None = None) -> tuple[float, float]:
    """Held-out loss after the steps, and seconds per step."""
    optimizer, passes = CASES[case]
    settings = OptimizerSettings(learning_rate=rate, warmup_steps=10, **optimizer)
    trainer = PolicyTrainer(model, join(), settings, seq_len=4096, **passes)
    begin = time.perf_counter()
    for step in range(steps):
        trainer.train_step(batch(first + step), SFTLoss())
    seconds = (time.perf_counter() - begin) / max(1, steps)
    if left is not None:
        checkpoint.export(trainer, left, model)
    held = batch(10**6, 256)
    return float(-trainer.logprobs(held)[held.mask].mean()), seconds


def main() -> None:
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        start, learnt = Path(folder, "start"), Path(folder, "learnt")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(start)
        TOKENIZER.save_pretrained(start)
        print("| settings | from scratch | continued at 1e-5 | seconds per step |\n|---|---|---|---|")
        print(f"| none: before | {train(start, '`adamw`', 0.0, 0, 0)[0]:.3f} | ", end="", flush=True)
        for number, case in enumerate(CASES):
            if case == "`adamw8bit`" and find_spec("torchao") is None:
                continue
            after, seconds = train(start, case, 3e-3, 60, 0, None if number else learnt)
            if not number:
                print(f"{train(learnt, case, 0.0, 0, 0)[0]:.3f} | |")
            print(
                f"| {case} | {after:.3f} | {train(learnt, case, 1e-5, 30, 1000)[0]:.3f} | {seconds:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
