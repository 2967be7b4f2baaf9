"""A run's folder: held by one controller, gone on with where it was, and never half removed."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forge.observability import Run
from forge.observability.console import report_waiting
from forge.observability.folder import RunLock, cut_lines
from forge.observability.metrics import Snapshot

HOLD = """
import os, subprocess, sys
from forge.observability.folder import RunLock
lock = RunLock(sys.argv[1])
os.dup2(lock._handle, 9, inheritable=True)
subprocess.Popen(["/bin/sh", "-c", 'sleep 1; touch "$0"', sys.argv[2]], pass_fds=[9])
os._exit(0)
"""


@pytest.mark.processes
def test_run_directory_lock_is_released_when_last_process_ends(tmp_path: Path):
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path / "run"), str(tmp_path / "ended")], check=True)
    lock = RunLock(tmp_path / "run")
    assert (tmp_path / "ended").exists()
    with pytest.raises(BlockingIOError, match="is in use by process"):
        RunLock(tmp_path / "run", patience=0.1)
    (tmp_path / "run/config.yaml").touch()
    lock.close()
    RunLock(tmp_path / "run").close()


def test_cut_lines_drops_metrics_of_later_steps_and_partial_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"step": step}) for step in (0, 1, 1, 2, 3)]
    path.write_text("\n".join([*lines, '{"step": 4, "re']))
    assert [row["step"] for row in cut_lines(path, 9)] == [0, 1, 1, 2, 3]
    assert [row["step"] for row in cut_lines(path, 1)] == [0, 1, 1]
    assert path.read_text().splitlines() == lines[:3]
    assert cut_lines(tmp_path / "none.jsonl", 3) == []


@pytest.mark.parametrize("damaged", [b"{", b'{"stdp": 1}', b'{"step": null}', b"5", b"\xff"])
def test_damaged_metrics_line_is_skipped_with_warning(tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 0}\n' + damaged + b'\n{"step": 2}\n')
    assert cut_lines(path, 9) == [{"step": 0}, {"step": 2}]
    assert path.read_text() == '{"step": 0}\n{"step": 2}\n'
    assert "rows.jsonl, line 2 is damaged and skipped" in caplog.text


def test_report_and_history_of_resumed_run_have_all_steps(tmp_path: Path):
    first = Run("one", {}, steps=4, root=str(tmp_path))
    for step in range(4):
        first.log(step, Snapshot(), reward=float(step))
    first.close()
    second = Run("one", {}, steps=4, root=str(tmp_path), overwrite=True, resume="a checkpoint", start=2)
    assert [row["step"] for row in second.history] == [0, 1, 2]
    for step in (3, 4):
        second.log(step, Snapshot(), reward=10.0)
    second.finish()
    second.close()
    assert [row["step"] for row in second.history] == [0, 1, 2, 3, 4]
    seconds = [row["seconds"] for row in second.history]
    assert seconds == sorted(seconds)
    assert (tmp_path / "one/finished").exists()
    Run("one", {}, steps=9, root=str(tmp_path), resume="a checkpoint", start=4)
    assert not (tmp_path / "one/finished").exists()


@pytest.mark.processes
def test_orphaned_reward_process_does_not_hold_run_lock(tmp_path: Path):
    code = """
import os, sys
from forge.observability.folder import RunLock
lock = RunLock(sys.argv[1])
if os.fork() == 0:
    os.setsid()
    os.close(0)
    print(os.getpid(), flush=True)
    os.execvp("sleep", ["sleep", "600"])
os.read(0, 1)
lock.close()
"""
    words = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        left = int(process.stdout.readline())
        process.stdin.close()
        try:
            assert process.wait() == 0
            RunLock(tmp_path / "run", patience=0).close()
        finally:
            os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize(
    ("steps", "start", "doing"),
    [([], 0, "starting the processes"), ([0], 0, "in the first step"), ([0, 1], 0, None), ([], 3, "starting the proc")],
)
def test_run_start_phase_is_described_until_first_step(tmp_path: Path, steps: list[int], start: int, doing: str | None):
    run = Run("one", {}, steps=9, root=str(tmp_path), start=start)
    for step in steps:
        run.log(step, Snapshot())
    assert (run.describe_start() or "")[: len(doing or "")] == (doing or "")
    assert (run.describe_start() is None) == (doing is None)


def test_report_waiting_logs_each_phase_until_start_ends(caplog: pytest.LogCaptureFixture):
    texts = iter(["opening", "loading", None])
    with caplog.at_level("INFO", "forge"):
        report_waiting(lambda: next(texts), interval=0.001)
        for thread in threading.enumerate():
            if thread.name == "forge-start":
                thread.join()
    assert [message.partition(",")[0] for message in caplog.messages] == ["opening", "loading"]


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        ([], "no checkpoint was written (checkpoint.every), so it starts again from step 0"),
        (["step_000001", "step_000002", "step_000003.tmp"], "ended after step 3 and is saved up to step 2: --resume"),
        (["step_000003"], "ended after step 3 and is saved up to step 3: --resume auto"),
    ],
)
def test_unfinished_run_message_names_last_saved_step(tmp_path: Path, checkpoints: list[str], said: str):
    run = Run("one", {}, steps=9, root=str(tmp_path))
    for step in (1, 2, 3):
        run.log(step, Snapshot())
    for name in checkpoints:
        (Path(run.checkpoints) / name).mkdir(parents=True)
    assert said in run.describe_saved()
