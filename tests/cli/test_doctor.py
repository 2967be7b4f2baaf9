"""`forge doctor` of this machine: one line a finding, and a problem says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.processes

PROBLEM = "PROBLEM: "
no_gpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


def doctor(*words: str, **environment: str) -> tuple[int, str, list[str]]:
    """The exit code, all that it printed, and its problems."""
    own = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "CC")}
    command = [sys.executable, "-m", "forge", "doctor", *words]
    done = subprocess.run(command, env=own | environment, capture_output=True, text=True, timeout=120, check=False)
    problems = [line.partition(PROBLEM)[2] for line in done.stdout.splitlines() if PROBLEM in line]
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr, problems


def tool(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@no_gpu
def test_forge_doctor_reports_no_gpu_problem_on_cpu_machine():
    code, output, problems = doctor()
    assert "GPUs" in output
    assert not [problem for problem in problems if "torch" in problem]
    assert code == bool(problems)


@pytest.mark.full
@no_gpu
def test_forge_doctor_reports_scheduled_gpus_torch_cannot_see():
    code, _, problems = doctor(CUDA_VISIBLE_DEVICES="0,1")
    assert code == 1
    assert any(problem.startswith("CUDA_VISIBLE_DEVICES names 2, and torch sees 0") for problem in problems)


@pytest.mark.full
@no_gpu
def test_forge_doctor_reports_driver_gpus_torch_cannot_see(tmp_path: Path):
    """With the driver's program only, and neither a compiler nor the headers that attention needs."""
    tool(tmp_path / "bin", "nvidia-smi", 'echo "NVIDIA H100 80GB HBM3, 81559 MiB, 580.159.04"')
    code, output, problems = doctor(PATH=str(tmp_path / "bin"))
    assert code == 1
    assert "the driver 1 (NVIDIA H100 80GB HBM3" in output
    assert any(problem.startswith("this machine has some, and torch sees 0: ") for problem in problems)
    assert "on a GPU attention is compiled: install gcc, and python3-dev" in problems
