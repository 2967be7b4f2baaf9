"""Moving weights between two processes' tensors on one machine, and what a sync does to generation.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--sizes 200 1000] [--rounds 7]

Every round does each of: a plain copy between two tensors that are in memory (memcpy), put and get of the weight store,
safetensors and torch.distributed.checkpoint on /dev/shm; the table has medians over rounds, the first version apart,
as ratios to the copy of the same round. The second table has the longest time between two decode steps of a running
batch, with and without weight updates alongside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from forge.engines import EmbeddedEngine
from forge.models import build_small_model
from forge.runtime.store import VersionStore, parallel
from forge.types import Sampling

MATRIX = (2048, 1024)  # of float32: 8.4 MB


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def copies(megabytes: int, rounds: int, folder: Path) -> None:
    count = max(1, round(megabytes * 1e6 / (MATRIX[0] * MATRIX[1] * 4)))
    weights = {f"layers.{n}.weight": torch.randn(MATRIX) for n in range(count)}
    into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    store = VersionStore.create()
    file, checkpoint = folder / "weights.safetensors", folder / "checkpoint"

    def memcpy() -> None:
        for name, tensor in weights.items():
            into[name].copy_(tensor)

    def load_safetensors() -> None:
        for name, tensor in load_file(file).items():
            into[name].copy_(tensor)

    def save_checkpoint() -> None:
        shutil.rmtree(checkpoint, ignore_errors=True)
        dcp.save(weights, checkpoint_id=checkpoint, no_dist=True)

    ways: dict[str, Callable[[], object]] = {
        "memcpy": memcpy,
        "store put": lambda: store.put("policy", weights),
        "store get": lambda: store.get("policy", into),
        "safetensors save": lambda: save_file(weights, file),
        "safetensors load": load_safetensors,
        "checkpoint save": save_checkpoint,
        "checkpoint load": lambda: dcp.load(into, checkpoint_id=checkpoint, no_dist=True),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        weights["layers.0.weight"][0, 0] = number
        for name, way in ways.items():
            took[name].append(timed(way))
            if name.endswith(("get", "load")):
                assert all(torch.equal(into[key], tensor) for key, tensor in weights.items()), name
                into["layers.0.weight"].zero_()
    store.close()
    size = sum(tensor.nbytes for tensor in weights.values()) / 1e9
    warm = 3  # the versions that are kept and the one that is written have been touched by then
    print(f"\n| {size:.2f} GB | first, s | warm, s | GB/s | times memcpy |\n|---|---|---|---|---|")
    for name, seconds in took.items():
        ratio = median(a / b for a, b in zip(seconds[warm:], took["memcpy"][warm:], strict=True))
        typical = median(seconds[warm:])
        print(f"| {name} | {seconds[0]:.3f} | {typical:.3f} | {size / typical:.1f} | {ratio:.2f} |")


def in_threads(megabytes: int, rounds: int) -> None:
    """Put and get with one thread and with one a core, in turn: hashing, copying, and reading into new tensors."""
    count = max(1, round(megabytes * 1e6 / (MATRIX[0] * MATRIX[1] * 4)))
    weights = {f"layers.{n}.weight": torch.randn(MATRIX) for n in range(count)}
    store = VersionStore.create()
    seconds: dict[tuple[str, int], list[float]] = {}
    large = parallel.LARGE
    for _ in range(rounds):
        for threads, bound in ((1, 1 << 60), (len(os.sched_getaffinity(0)), 0)):
            parallel.LARGE = bound
            seconds.setdefault(("put", threads), []).append(timed(lambda: store.put("policy", weights)))
            seconds.setdefault(("get", threads), []).append(timed(lambda: store.get("policy")))
    parallel.LARGE = large
    store.close()
    print("\n| way, threads | median s | ratio to one thread |\n|---|---|---|")
    for (way, threads), times in seconds.items():
        ratio = median(one / some for one, some in zip(seconds[way, 1], times, strict=True))
        print(f"| {way}, {threads} | {median(times):.3f} | {ratio:.2f} |")


def gaps(folder: Path, rounds: int) -> None:
    """The longest time between two decode steps in stretches with and without an update, by turns."""
    model = build_small_model(
        folder / "model", seed=0, alphabet=None, hidden_size=768, layers=8, heads=12, kv_heads=4, max_positions=2048
    )
    store = VersionStore.create()
    longest: dict[bool, list[float]] = {False: [], True: []}
    steps: list[float] = []
    with EmbeddedEngine(model, slots=32) as engine:
        step = engine._batch.step

        def watched():
            finished = step()
            steps.append(time.perf_counter())
            return finished

        engine._batch.step = watched  # type: ignore[method-assign]
        names = {name: tensor.clone() for name, tensor in _named(model)}
        size = sum(tensor.nbytes for tensor in names.values())
        stop = threading.Event()

        def feed() -> None:
            while not stop.is_set():
                engine.submit([5, 6, 7], Sampling(n=32, max_tokens=400)).result()

        feeder = threading.Thread(target=feed)
        feeder.start()
        time.sleep(2.0)
        for version in range(1, 2 * rounds + 1):
            store.put("policy", names, version)
            time.sleep(0.3)
            began = len(steps)
            if version % 2:
                with store.open("policy", version) as snapshot:
                    engine.update_weights(snapshot.tensors(), version, snapshot.digest).result()
                took = time.perf_counter() - steps[began - 1]
            else:
                time.sleep(took)
            time.sleep(0.2)
            times = steps[began - 1 :]
            longest[bool(version % 2)].append(max(b - a for a, b in pairwise(times)))
        stop.set()
        feeder.join()
        usual = median(b - a for a, b in pairwise(steps))
    store.close()
    print(f"\n{size / 1e6:.0f} MB of weights, 32 sequences, {len(steps)} steps of {usual * 1e3:.1f} ms (median)")
    print("\n| stretch | longest gap, ms: median | worst | in steps: median |\n|---|---|---|---|")
    for updating, name in ((False, "no update"), (True, "an update alongside it")):
        values = longest[updating]
        print(f"| {name} | {median(values) * 1e3:.1f} | {max(values) * 1e3:.1f} | {median(values) / usual:.2f} |")


def _named(model: str) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(Path(model) / "model.safetensors").items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="*", default=[200, 1000], help="megabytes")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    folder = Path(tempfile.mkdtemp(prefix="weight-sync-", dir="/dev/shm"))
    try:
        for megabytes in args.sizes:
            copies(megabytes, args.rounds, folder)
        in_threads(max(args.sizes), args.rounds)
        gaps(folder, args.rounds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
