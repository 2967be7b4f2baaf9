"""Weights between two hosts over a real run: patches against whole versions.

    python -m apps.sft.main --config apps/sft/tiny.yaml
    python benchmarks/delta_sync.py record --steps 200             # trains the quickstart, keeps what it publishes
    python benchmarks/delta_sync.py sizes                          # bytes of each way to code a difference
    python benchmarks/delta_sync.py hosts --rate 100mbit 1gbit     # real transfers between two machines; needs root
    python benchmarks/delta_sync.py parts --rate 1gbit 100gbit     # seconds of writing, sending and reading 210 MB

The quickstart has a learning rate of 3e-4. With `--learning-rate 3e-6 --folder build/delta-sync-slow` fewer weights
change in a step, as in runs of large models.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import forge
from forge.actors.store_ref import connect, share
from forge.config.sections import read_file
from forge.runtime.controller import ForgeActor, endpoint, run, runtime
from forge.runtime.store import VersionStore, default_store
from forge.runtime.store.delta import Bytes, decode, encode

KEY = "policy"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BLOCKS = (64, 256, 1024, 4096, 65536)  # bytes


def record(folder: Path, steps: int, learning_rate: float) -> None:
    """Train the quickstart, and keep the weights that it publishes, a file for each version."""
    folder.mkdir(parents=True, exist_ok=True)

    def keep(step: int, metrics: dict[str, float]) -> None:
        store = default_store()
        version = store.versions(KEY)[-1]
        assert version == step, f"step {step} ends with version {version}"
        save_file(store.get(KEY, version=version), folder / f"{version:04d}.safetensors")

    settings = read_file(ROOT / "apps/grpo/tiny.yaml")
    settings["run"] = {"root": str(folder), "name": "run", "overwrite": True}
    settings["training"] |= {"steps": steps, "learning_rate": learning_rate}
    settings["eval"] |= {"every": steps}
    named = {name: settings.pop(name) for name in ("model", "dataset", "algorithm", "reward")}
    forge.train(**named, on_step=keep, **settings)


def recorded(folder: Path) -> list[Path]:
    """The files of a run's versions."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) < 2:
        raise SystemExit(f"no versions in {folder}: run `python benchmarks/delta_sync.py record` first")
    return files


def read(file: Path, dtype: torch.dtype, copies: int = 1) -> dict[str, Tensor]:
    """The weights of a file, each several times in one tensor for a model of that many times its size."""
    return {name: torch.cat([tensor.to(dtype)] * copies) for name, tensor in load_file(file).items()}


def row(name: str, values: list[float]) -> str:
    median, high = np.quantile(values, [0.5, 0.9])
    return f"| {name} | {median:.3f} | {high:.3f} |"


def sizes(folder: Path) -> None:
    """What each coding sends of a version: fractions of its bytes, each tensor whole where that is less."""
    for label, dtype in DTYPES.items():
        fractions: dict[str, list[float]] = {"elements that changed": []}
        rates: dict[str, list[float]] = {"encode": [], "decode": []}
        for before, after in pairwise(recorded(folder)):
            old, new = read(before, dtype), read(after, dtype)
            total = sum(tensor.nbytes for tensor in new.values())
            changed = elements = 0
            sent: dict[str, int] = {}
            seconds = {"encode": 0.0, "decode": 0.0}
            for name, values in new.items():
                difference = words(values) != words(old[name])
                changed += int(difference.sum())
                elements += len(difference)
                for coding, size in codings(difference, values.element_size()).items():
                    sent[coding] = sent.get(coding, 0) + min(size, values.nbytes)
                filled = torch.empty_like(values)
                began = time.perf_counter()
                code = encode(values, old[name])
                encoded = time.perf_counter()
                decode(code, old[name], filled)
                seconds["decode"] += time.perf_counter() - encoded
                seconds["encode"] += encoded - began
                assert torch.equal(filled.view(torch.uint8), values.view(torch.uint8)), name
                sent["folded differences"] = sent.get("folded differences", 0) + len(code)
            fractions["elements that changed"].append(changed / elements)
            for coding, size in sent.items():
                fractions.setdefault(coding, []).append(size / total)
            for way, took in seconds.items():
                rates[way].append(total / 1e9 / took)
        print(f"\n| {label}, {len(fractions['folded differences'])} steps | median | p90 |\n|---|---|---|")
        for coding, values in fractions.items():
            print(row(coding, values))
        print("GB/s of the version, medians: " + ", ".join(f"{way} {np.median(v):.2f}" for way, v in rates.items()))


def codings(difference: np.ndarray, itemsize: int) -> dict[str, int]:
    """Bytes by other codings: blocks that changed, and a byte of distance and the value of each changed element."""
    changed = int(difference.sum())
    sizes = {"index and value": changed * (1 + itemsize) + (len(difference) - changed) // 255}
    for size in BLOCKS:
        per_block = size // itemsize
        padded = np.pad(difference, (0, -len(difference) % per_block)).reshape(-1, per_block)
        sizes[f"blocks of {size} bytes"] = int(padded.any(1).sum()) * size + len(padded) // 8
    return sizes


def words(tensor: Tensor) -> Bytes:
    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
    return flat


class Reader(ForgeActor):
    """Reads versions on another host."""

    def __init__(self, store: object) -> None:
        self.store_ref = store

    def setup(self) -> None:
        self.store = connect(self.store_ref)  # type: ignore[arg-type]

    @endpoint
    def load(self, version: int) -> tuple[float, float]:
        """Seconds until a version is on this host, and until it is in tensors of this process."""
        assert self.store is not None
        target = random_weights(0)
        began = time.perf_counter()
        with self.store.open(KEY, version) as snapshot:
            sent = time.perf_counter() - began
            snapshot.fill(target)
        return sent, time.perf_counter() - began - sent

    @endpoint
    def fetch(self, version: int, file: str, dtype: str, copies: int) -> float:
        """Seconds until a version is on this host; it has to be that of the file, bit for bit."""
        assert self.store is not None
        began = time.perf_counter()
        with self.store.open(KEY, version):
            took = time.perf_counter() - began
        weights = self.store.get(KEY, version=version)
        for name, values in read(Path(file), DTYPES[dtype], copies).items():
            assert torch.equal(weights[name].view(torch.uint8), values.view(torch.uint8)), name
        return took


async def transfers(deltas: str, dtype: str, folder: str, copies: int, steps: int) -> None:
    """The controller: publishes each version, which a host then fetches."""
    store = VersionStore.create()
    reader = await Reader.options(hosts=1).as_actor(await share(store, deltas))  # type: ignore[arg-type]
    seconds: list[float] = []
    fractions: list[float] = []
    sent = 0.0
    for version, file in enumerate(recorded(Path(folder))[: steps + 1], 1):
        store.put(KEY, read(file, DTYPES[dtype], copies), version)
        took = await reader.fetch.call_one(version, str(file), dtype, copies)
        metrics = (await runtime().drain_metrics({})).values()
        assert metrics["weight_sync/fallbacks"] == 0
        if version > 1:  # the first is whole
            sent += metrics["weight_sync/bytes"]
            seconds.append(took)
            fractions.append(metrics["weight_sync/sent_fraction"])
    median, high = np.quantile(seconds, [0.5, 0.9])
    part, large = np.quantile(fractions, [0.5, 0.9])
    print(f"{sent / 1e6:.1f} | {part:.3f} | {large:.3f} | {1e3 * median:.1f} | {1e3 * high:.1f} |", flush=True)
    store.close()


def random_weights(seed: int) -> dict[str, Tensor]:
    """Weights of 210 MB."""
    random = torch.Generator().manual_seed(seed)
    return {f"layers.{layer}.weight": torch.randn(2048, 2048, generator=random).bfloat16() for layer in range(25)}


async def one_after_the_other(versions: int) -> None:
    """The controller: writes each version, which a host then fetches whole and reads."""
    store = VersionStore.create()
    reader = await Reader.options(hosts=1).as_actor(await share(store, "never"))
    seconds = []
    for version in range(versions):
        weights = random_weights(version)
        began = time.perf_counter()
        store.put(KEY, weights, version)
        seconds.append((time.perf_counter() - began, *(await reader.load.call_one(version))))
    # The first one also makes connections.
    print(" | ".join(f"{1e3 * np.median(column):.0f}" for column in zip(*seconds[1:], strict=True)), "|", flush=True)
    store.close()


def parts(rates: list[str], versions: int) -> None:
    """What an update over two machines made of namespaces takes, part by part."""
    from tests.runtime.cluster.machines import Machines, environment, listens, wait_until

    print("| rate | ms: write | send | read |\n|---|---|---|---|")
    for rate in rates:
        with Machines(2, shared=[ROOT, sys.prefix]) as lab:
            lab[1].work()
            wait_until(lambda lab=lab: listens(lab[1]), 60, "the worker listens")
            for machine in lab:
                machine.slow(rate)
            print(f"| {rate} | ", end="", flush=True)
            command = [sys.executable, __file__, "parts-inside", "--steps", str(versions)]
            done = lab[0].run(command, str(ROOT), env=environment(FORGE_HOSTS="m2"), capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            print(done.stdout, end="")


def hosts(folder: Path, rates: list[str], copies: int, steps: int) -> None:
    """Each way, dtype and rate over two machines made of namespaces."""
    from tests.runtime.cluster.machines import Machines, environment, listens, wait_until

    print("| rate, dtype, way | MB sent | fraction: median | p90 | ms: median | p90 |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
        for rate in rates:
            for dtype in DTYPES:
                for deltas in ("never", "always"):
                    with Machines(2, shared=[ROOT, sys.prefix, Path(scratch)]) as lab:
                        lab[1].work()
                        wait_until(lambda lab=lab: listens(lab[1]), 60, "the worker listens")
                        for machine in lab:
                            machine.slow(rate)
                        command = [sys.executable, __file__, "transfers", "--folder", str(folder)]
                        command += ["--deltas", deltas, "--dtype", dtype]
                        command += ["--copies", str(copies), "--steps", str(steps)]
                        print(f"| {rate}, {dtype}, {deltas} | ", end="", flush=True)
                        log = (Path(scratch) / "log").open("w+")
                        variables = environment(FORGE_HOSTS="m2")
                        if lab[0].start(command, str(ROOT), env=variables, stderr=log).wait():
                            log.seek(0)
                            raise SystemExit(log.read()[-3000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["record", "sizes", "hosts", "transfers", "parts", "parts-inside"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/delta-sync")
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--copies", type=int, default=1, help="of the model, side by side: a larger one")
    parser.add_argument("--deltas", default="always", help="of one transfer, which `hosts` starts")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.part == "record":
        record(folder, arguments.steps, arguments.learning_rate)
    elif arguments.part == "sizes":
        sizes(folder)
    elif arguments.part == "parts":
        parts(arguments.rate, min(arguments.steps, 8))
    elif arguments.part == "parts-inside":
        run(one_after_the_other(arguments.steps), wait_for_hosts=60.0)
    elif arguments.part == "hosts":
        hosts(folder, arguments.rate, arguments.copies, arguments.steps)
    else:
        run(
            transfers(arguments.deltas, arguments.dtype, str(folder), arguments.copies, arguments.steps),
            wait_for_hosts=60.0,
        )


if __name__ == "__main__":
    main()
