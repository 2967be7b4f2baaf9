"""A profile of selected steps is a trace of the operators of a process."""

import json
from pathlib import Path

import torch

from forge_inspect.profiler import profile_next


def test_profiler_file_is_a_trace_of_torch_operators(tmp_path: Path):
    profile_next(None, "trainer")  # nothing runs: nothing is written
    profile_next(str(tmp_path / "step_1"), "trainer")
    torch.ones(8, 8) @ torch.ones(8, 8)
    profile_next(None, "trainer")
    trace = json.loads((tmp_path / "step_1/trainer.json").read_text())
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
    assert list(tmp_path.iterdir()) == [tmp_path / "step_1"]
