"""Accelerators: what a scheduler's variables name, and what was promised and is not there."""

import os
import subprocess
import sys

import pytest
import torch

from forge.runtime.inventory import visible_gpus
from forge.system.devices import GRANTED, find_accelerator


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("0", ["0"]),
        ("0,1, 3", ["0", "1", "3"]),
        ("-1", []),
        ("2,-1,3", ["2"]),
        ("NoDevFiles,0", ["NoDevFiles", "0"]),
        ("GPU-8f8c2a1e-0000-4d2e-9d3e-5b0f7a6c1d11", ["GPU-8f8c2a1e-0000-4d2e-9d3e-5b0f7a6c1d11"]),
        ("MIG-4b0f7a6c-1d11-5e8a-8f8c-2a1e00004d2e,MIG-2", ["MIG-4b0f7a6c-1d11-5e8a-8f8c-2a1e00004d2e", "MIG-2"]),
    ],
)
def test_visible_gpus_parses_indices_uuids_and_mig_devices(
    monkeypatch: pytest.MonkeyPatch, value: str, names: list[str]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == names


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_assigned_gpu_that_torch_cannot_see_raises(monkeypatch: pytest.MonkeyPatch):
    assert find_accelerator() is None
    monkeypatch.setenv(GRANTED, "1")
    with pytest.raises(
        RuntimeError, match=r"^this process was assigned GPU 1, but torch .* sees no GPU: .* with_gpus to fal"
    ):
        find_accelerator()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_component_with_missing_gpu_raises_one_line_error(tmp_path):
    """As under Slurm with a build of torch for CPUs: it trained on the CPU without a word."""
    words = ["-m", "apps.sft.main", "--config", "apps/sft/tiny.yaml", "--services.trainer.with_gpus", "true"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run(
        [sys.executable, *words, "--run.root", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "was assigned GPU " in errors[0]
    assert "Traceback" not in done.stderr
