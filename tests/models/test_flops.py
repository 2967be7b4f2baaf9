"""Operations of a forward pass, against torch's own counter; the profile of a step of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from forge.models.flops import causal, forward_flops, peak_tflops
from tests.recipes.test_recipes import command, finish
from tests.training.cases import tiny_model

LENGTH = 12


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_operations_are_those_that_torch_counts(family: str):
    model = tiny_model(family)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 3 + LENGTH)[None])
    # Eager attention computes the whole square, and this module the half that is attended to.
    expected = forward_flops(model.config, LENGTH, LENGTH * LENGTH, LENGTH)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)
    assert causal(LENGTH) == sum(range(1, LENGTH + 1))
    assert causal(3, context=5) == 6 + 7 + 8


def test_peaks():
    assert peak_tflops(None, "NVIDIA H100 80GB HBM3") == 989.0
    assert peak_tflops(None, "an unknown GPU") is None
    threads = torch.get_num_threads()
    measured = peak_tflops(1, None)
    assert measured is not None
    assert 0 < measured < 100
    assert torch.get_num_threads() == threads


@pytest.mark.full
@pytest.mark.processes
def test_the_steps_that_are_named_are_profiled(tmp_path: Path):
    profile = ["--metrics.profile", "{steps: [2], services: [trainer, generator]}"]
    code, output = finish(*command(tmp_path, *profile, "--generator.num_replicas", "1"))
    assert code == 0, output
    run = tmp_path / "runs/test"
    assert [folder.name for folder in (run / "profile").iterdir()] == ["step_000002"]
    for process in ("trainer0", "generator0"):
        events = json.loads((run / f"profile/step_000002/{process}.json").read_text())["traceEvents"]
        # Products of matrices: torch's own, or oneDNN's where it is quicker.
        names = {event.get("name", "") for event in events}
        assert any(name.startswith(("aten::mm", "aten::addmm", "mkldnn::_linear")) for name in names), sorted(names)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    for name in ("train/tflops", "train/mfu", "generator/tflops", "generator/mfu", "cpu_seconds/trainer"):
        assert all(row[name] > 0 for row in rows), name
    wrong = ["--metrics.profile", "{steps: [2], services: [oracle]}"]
    code, output = finish(*command(tmp_path, *wrong))
    assert code == 1
    assert "metrics.profile.services: 'oracle' is none of" in output
