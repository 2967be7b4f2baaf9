"""The lines that a run prints about its progress."""

from __future__ import annotations

import logging
import types

import pytest

from forge.observability import console


def test_the_remaining_time_is_that_of_later_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    now = 1000.0
    monkeypatch.setattr(console, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(console.sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(logging.getLogger("forge"), "propagate", True)
    caplog.set_level(logging.INFO, "forge.run")
    progress = console.Progress("run", 20)
    speed = {"generation/tokens_per_second": 0.0}
    now += 300  # the start of the processes
    progress.update(0, {"eval/accuracy": 0.5, **speed})
    now += 100  # the first step, which compiles
    progress.update(1, {"reward": 0.25, **speed})
    for step in range(2, 21):
        now += 20
        progress.update(step, {"reward": 0.25, **speed})
    progress.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "step 0/20  held-out 0.50  before training"
    assert lines[1:5] == [f"step {step}/20  reward 0.25" for step in (1, 2, 3, 4)]
    assert lines[5:] == [f"step {step}/20  reward 0.25  {20 * (20 - step)} s left" for step in range(5, 21)]
