"""TorchStore's package as a weight store: real processes with the package, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).parents[3]
PROGRAM = "tests.runtime.store.package_program"
needs_package = pytest.mark.skipif(
    find_spec("torchstore") is None or find_spec("pygtrie") is None,
    reason="TorchStore's package is not installed: docs/weights.md says how",
)
pytestmark = pytest.mark.processes
RUN = [
    *("-m", "forge", "train", "tests/runtime/cluster/tiny.yaml", "--training.steps", "5"),
    *("--services.trainer.hosts", "null", "--services.generator.hosts", "null"),
]


def run_python(words: list[str], limit: float, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's folder; `folders` are searched for modules first."""
    path = os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit, check=False, env=environment, cwd=REPOSITORY
    )


@needs_package
@pytest.mark.full
@pytest.mark.parametrize("task", ["versions", "resharding"])
def test_processes_with_the_package(task: str):
    done = run_python(["-m", PROGRAM, task], 280)
    assert done.stdout.endswith("done\n"), done.stdout[-1000:] + done.stderr[-4000:]


@needs_package
@pytest.mark.full
def test_a_run_has_the_rewards_and_weights_of_this_librarys_store(tmp_path: Path):
    for store in ("forge", "torchstore"):
        words = [*RUN, "--run.root", str(tmp_path), "--run.name", store, "--cluster.store", store]
        done = run_python(words, 280)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "terminate called" not in done.stderr
        assert "Traceback" not in done.stderr
    rewards = [
        [json.loads(line).get("reward") for line in (tmp_path / store / "metrics.jsonl").read_text().splitlines()]
        for store in ("forge", "torchstore")
    ]
    assert len(rewards[0]) >= 5
    assert rewards[0] == rewards[1]
    ours, theirs = (load_file(tmp_path / store / "model" / "model.safetensors") for store in ("forge", "torchstore"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "initialize = put = get = keys = None",
            "the installed TorchStore has no shutdown, put_batch, get_batch, delete_",
        ),
        ("import a_module_that_is_absent", "needs TorchStore's package (No module named 'a_module_that_is_absent')"),
    ],
)
def test_a_package_that_does_not_fit_is_one_line_before_any_process(tmp_path: Path, source: str, line: str):
    (tmp_path / "torchstore.py").write_text(source)
    done = run_python([*RUN, "--run.root", str(tmp_path / "runs"), "--cluster.store", "torchstore"], 120, tmp_path)
    assert done.returncode
    assert line in done.stderr
    assert "github.com/meta-pytorch/torchstore" in done.stderr
    assert "Traceback" not in done.stderr
    assert "starting the processes" not in done.stderr
