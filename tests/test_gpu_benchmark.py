"""The first half hour on a GPU: its verdicts, and the same path in a small form on a CPU."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import gpu_counts

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]


def script(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.full
def test_each_gpu_benchmark_runs_at_small_size():
    done = script("benchmarks/small.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_failing_gpu_benchmark_parts_are_reported_as_failed():
    """Each of four parts, two at once: a figure beyond its limit, an exception, the end of its process, no end."""
    parts = """
        import os, sys, tempfile, time
        from pathlib import Path
        from gpu import Part, results
        from gpu_setup import Row, Setup

        def beyond(setup):
            yield Row.at_most("a figure", 2.0, 1.0, ".0f")
            yield Row.at_most("another", 1.0, 1.0, ".0f")

        def raising(setup):
            yield Row("before", "1")
            raise ValueError("of two\\nlines")

        def leaving(setup):
            os._exit(3)
            yield

        def endless(setup):
            time.sleep(1000)
            yield

        parts = {"beyond": Part(beyond, 60, False), "raising": Part(raising, 60, False)}
        parts |= {"leaving": Part(leaving, 60), "endless": Part(endless, 1)}
        with tempfile.TemporaryDirectory() as folder:
            for row in results(parts, Setup("tiny", Path(folder)), Path(folder) / "rows.jsonl", jobs=2):
                print(row.what, row.figure, row.limit, row.passed, sep="|")
    """
    done = script("-c", textwrap.dedent(parts))
    assert sorted(done.stdout.splitlines()) == [
        "a figure|2|at most 1|False",
        "another|1|at most 1|True",
        "before|1||True",
        "endless|did not end within its limit||False",
        "leaving|ended with 3||False",
        "raising|ValueError: of two||False",
    ]


@pytest.mark.full
def test_documented_gpu_counts_hold_on_emulated_device():
    """What docs/benchmarks.md says of waits, launches and bytes."""
    counts = {row.what: row.now for row in gpu_counts.rows()}
    assert counts["host waits of a micro-batch"] == "0"
    assert counts["host waits of an update besides"] == "2"
    assert counts["host waits of an offload and the return"] == "1"
    assert counts["host waits of a decode step"] == "1"
    assert counts["launches of a decode step"] == "141; 3 with cuda_graphs"
    assert counts["tensors that a CPU casts on the way"] == "0"
    assert counts["bytes of a parameter to the host, a weight update; of Qwen3-8B"] == "2; 16.4 GB"
