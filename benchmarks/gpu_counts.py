"""What a GPU's host waits for, launches and copies, counted without a GPU, next to what it was before.

    python -m benchmarks.gpu_counts   # the table of docs/benchmarks.md

On the emulated device of the tests (a Qwen3 of two layers). "Before" are the figures of a review of commit 7bd30ee, on
that device or an H100, which are not measured again here.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from forge.engines import EmbeddedEngine, graphs
from forge.losses import GRPOLoss
from forge.runtime.store import VersionStore
from forge.types import Sampling
from tests.emulated import NAME, Emulation, emulated
from tests.engines.captured import checked_capture
from tests.engines.conftest import random_model
from tests.engines.test_emulated import MODELS
from tests.training.cases import example, make_trainer, write_model

LENGTHS = [(3, 5), (1, 9), (6, 2), (2, 1), (4, 4), (5, 7)]
LOSS = GRPOLoss(0.2, 0.3)
QWEN3_8B = 8_190_735_360  # parameters


class Row(NamedTuple):
    """A line of the table: what is counted, what the review counted, and what is counted now."""

    what: str
    before: str
    now: str


def training(model: Path) -> Iterator[Row]:
    """Host waits of an update and of a micro-batch more, and what leaves and comes back to the device."""
    with emulated() as emulation:
        trainer = make_trainer(model)
        waits, copied = [], []
        for parts in (1, 3):
            trainer.passes = trainer.passes.model_copy(update={"gradient_accumulation_steps": parts})
            before = emulation.copied.copy()
            with emulation.counted() as counted:
                trainer.train_step(example(parts, LENGTHS), LOSS)
            waits.append(counted.total())
            copied.append((emulation.copied - before)["to the host"])
        yield Row("host waits of a micro-batch", "16", f"{(waits[1] - waits[0]) / 2:g}")
        yield Row("host waits of an update besides", "4", f"{waits[0] - (waits[1] - waits[0]) / 2:g}")
        yield Row("bytes to the host, an update with one micro-batch", "-", f"{copied[0]:,}")
        launches = emulation.launches
        trainer.passes = trainer.passes.model_copy(update={"gradient_accumulation_steps": 1})
        trainer.train_step(example(5, LENGTHS), LOSS)
        yield Row("launches of an update with one micro-batch", "-", f"{emulation.launches - launches:,}")
        module: Any = torch.get_device_module(emulation.device)
        synchronised = module.synchronize.call_count
        with emulation.counted() as counted:
            trainer.offload()
            trainer.onload()
        total = counted.total() + module.synchronize.call_count - synchronised
        yield Row("host waits of an offload and the return", "1 a tensor, each way", str(total))


def publication(model: Path, folder: Path) -> Iterator[Row]:
    """Bytes of a parameter from the device to the store, for an engine in bfloat16."""
    store = VersionStore(folder)
    store.prepare()
    with emulated() as emulation:
        weights = dict(make_trainer(model).weights())
        elements = sum(weight.numel() for weight in weights.values())
        before = emulation.copied.copy()
        with emulation.counted() as waits:
            store.put("policy", weights, 1, dtype=torch.bfloat16)
        copied = (emulation.copied - before)["to the host"]
    each = copied / elements
    casts = sum(count for line, count in waits.items() if "cast" in line)
    yield Row(
        "bytes of a parameter to the host, a weight update; of Qwen3-8B",
        "4; 32.8 GB",
        f"{each:.2g}; {each * QWEN3_8B / 1e9:.1f} GB",
    )
    yield Row("tensors that a CPU casts on the way", "all", str(casts))
    yield Row("host waits of a weight update", "1 a tensor", f"{waits.total() / len(weights):g} a tensor")


def decoding(model: Path) -> Iterator[Row]:
    """Host waits, launches and bytes of a decode step of three samples."""

    def step(emulation: Emulation, settings: dict[str, Any], listener: Any = None, **sampling: Any) -> list[float]:
        counts = []
        for tokens in (10, 50):
            with EmbeddedEngine(model, slots=4, max_seq_len=64, **settings) as engine:
                start = np.array([emulation.waits.total(), emulation.launches, emulation.copied["to the host"]])
                asked = Sampling(n=3, max_tokens=tokens, seed=1, **sampling)
                engine.submit([5, 6, 7], asked, listener=listener).result(60)
                end = np.array([emulation.waits.total(), emulation.launches, emulation.copied["to the host"]])
            counts.append(end - start)
        # What a request has besides its steps is the same in both.
        per_step: list[float] = ((counts[1] - counts[0]) / 40).tolist()
        return per_step

    with mock.patch.dict(graphs.CAPTURES, {NAME: checked_capture}), emulated() as emulation:
        plain = step(emulation, {})
        captured = step(emulation, {"cuda_graphs": True})
        listened = step(emulation, {}, listener=lambda *_: None)
        top = step(emulation, {}, top_logprobs=2)
    yield Row("host waits of a decode step", "2", f"{plain[0]:g}")
    yield Row("the same with a listener; with top_logprobs", "3; 3", f"{listened[0]:g}; {top[0]:g}")
    yield Row("launches of a decode step", "144", f"{plain[1]:g}; {captured[1]:g} with cuda_graphs")
    yield Row("bytes to the host, a decode step of three rows", "-", f"{plain[2]:g}")


def rows() -> Iterator[Row]:
    """All lines."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        yield from training(model)
        endless = Path(folder) / "endless"  # without a token that ends a sample
        random_model(**MODELS["qwen3"]).save_pretrained(endless)
        yield from decoding(endless)
        store = Path(folder) / "store"
        store.mkdir()
        yield from publication(model, store)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| | before | now |\n|---|---|---|")
    for row in rows():
        print(f"| {row.what} | {row.before} | {row.now} |", flush=True)


if __name__ == "__main__":
    main()
