"""FlexAttention over trees, forward and backward, compiles for cards that are not there, and fits into them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed: torch's build for CPUs has none"
    ),
]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_fit_the_card(capability: int, tmp_path: Path):
    """Of shared memory they take 34 to 206 kB; the largest is the backward pass of heads of 128 on a B200.

    Registers spill in torch's templates, most in float32 (up to 11 kB a thread) and in backward passes; not in the
    forward pass that most models have.
    """
    from tests.training.flex_kernels import CARDS, CASES

    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-m", "tests.training.flex_kernels", str(capability)]
    result = subprocess.run(command, env=os.environ | caches, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    kernels = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [kernel["backward"] for kernel in kernels] == [False, True] * len(CASES)
    for kernel in kernels:
        assert kernel["sizes"], kernel
        assert 0 < kernel["shared"] <= CARDS[capability].shared, kernel
    common = [kernel for kernel in kernels if (kernel["dtype"], kernel["size"]) == ("bfloat16", 128)]
    assert [kernel["stack"] for kernel in common if not kernel["backward"]] == [0, 0]
