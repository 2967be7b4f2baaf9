"""The processor that a benchmark runs on, as a line for its table: ratios between libraries change with its products.

python benchmarks/processor.py
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

SIZE = 1024  # rows and columns of the products, large enough that a thread reaches its peak
REPEATS = 15


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median CPU-seconds of a call, after one that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def rates() -> dict[str, float]:
    """FLOP/s of this thread in float32 products of square matrices, by library: torch's default, and oneDNN."""
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    packed = torch.ops.mkldnn._reorder_linear_weight(b)
    ways: dict[str, Callable[[], object]] = {
        "torch": lambda: a @ b.T,
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""),
    }
    return {name: 2 * SIZE**3 / seconds(way, REPEATS) for name, way in ways.items()}


def name() -> str:
    """The processor's name by its maker."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def described() -> str:
    """Name, instruction set and rates of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shares = ", ".join(f"{library} {rate / 1e9:.0f}" for library, rate in rates().items())
    finally:
        torch.set_num_threads(threads)
    return f"{name()}, {torch.backends.cpu.get_cpu_capability()}, GFLOP/s a thread in float32: {shares}"


if __name__ == "__main__":
    print(described())
