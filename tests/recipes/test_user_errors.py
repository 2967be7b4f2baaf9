"""Rewards and environments that raise: what reaches the user, and what the folder of the run says."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge.recipes.launch import user_frames
from forge.rewards.reward import BadScore, FunctionVerifier
from forge.runtime.controller.errors import RemoteFailure
from forge_inspect.runs import read_ending, read_state

REWARD = """
class Odd(Exception):
    def __init__(self, row, why):
        super().__init__(f"{row}: {why}")

calls = 0

def looked_up(row):
    return row["answer"]

def later(prompt, response, target):
    global calls
    calls += 1
    return looked_up({"answer": calls / 100} if calls <= 16 else {})
"""
RUN = """
from_scratch: {alphabet: "abc>"}
dataset: {path: rows.jsonl, prompt_template: "{question}>"}
reward: {functions: ["rewards:later"]}
eval: {problems: 0}
training: {steps: 6, batch_size: 2, seq_len: 128, warmup_steps: 0}
grpo: {n_samples: 4, max_tokens: 4}
run: {name: fails}
"""
ROWS = [{"question": word, "answer": word[::-1]} for word in ("abc", "bca", "cab")]


@pytest.mark.processes
@pytest.mark.full
def test_raising_reward_shows_only_user_traceback(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    program = Path(sys.executable).with_name("forge")
    done = subprocess.run([program, "train", "run.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    printed = done.stderr.splitlines()
    start = next(number for number, line in enumerate(printed) if line.startswith("Traceback in your code"))
    told = "\n".join(printed[start:])
    assert f'File "{tmp_path}/rewards.py", line 14, in later' in told
    assert f'File "{tmp_path}/rewards.py", line 9, in looked_up' in told
    assert "error: KeyError: 'answer'\nthe reward later scored prompt '" in told
    assert "in step " in told
    assert "site-packages" not in told
    assert "src/forge" not in told
    folder = tmp_path / "runs/fails"
    assert (read_state(folder), read_ending(folder)) == ("failed", "failed: KeyError: 'answer'")
    assert f'File "{tmp_path}/rewards.py", line 9, in looked_up' in (folder / "ended.txt").read_text()
    listed = subprocess.run([program, "runs", "runs"], cwd=tmp_path, capture_output=True, text=True)
    assert "failed: KeyError: 'answer'" in listed.stdout
    if (folder / "report.html").exists():
        assert '"state":"failed"' in (folder / "report.html").read_text()


MISBEHAVING = """
import sys, threading

calls = 0

def when(count):
    global calls
    calls += 1
    return calls > count

def another_type(prompt, response, target):
    return "good" if when(16) else calls / 100

def nothing(prompt, response, target):
    return None

def leaves(prompt, response, target):
    return sys.exit(3) if when(16) else calls / 100

def ends_generators(prompt, response, target):
    if when(16):
        raise GeneratorExit("nothing left")
    return calls / 100

def recurses(prompt, response, target):
    return recurses(prompt, response, target) if when(16) else calls / 100
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("function", "message", "traced"),
    [
        pytest.param(
            "another_type", "the reward another_type gave 'good': give a finite number", False, marks=pytest.mark.full
        ),
        pytest.param("nothing", "no episode of 64 consecutive groups could be scored", False, marks=pytest.mark.slow),
        pytest.param("leaves", "the reward leaves raised SystemExit", True, marks=pytest.mark.full),
        pytest.param(
            "ends_generators",
            "the reward ends_generators raised GeneratorExit('nothing left')",
            True,
            marks=pytest.mark.full,
        ),
        pytest.param("recurses", "RecursionError: maximum recursion depth exceeded", True, marks=pytest.mark.slow),
    ],
)
def test_misbehaving_reward_ends_run_with_one_line_error(tmp_path: Path, function: str, message: str, traced: bool):
    (tmp_path / "rewards.py").write_text(MISBEHAVING)
    (tmp_path / "run.yaml").write_text(RUN.replace("later", function).replace("steps: 6", "steps: 60"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    program = Path(sys.executable).with_name("forge")
    done = subprocess.run([program, "train", "run.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert ("Traceback in your code" in done.stderr) == traced
    assert "Traceback (most recent call last)" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "src/forge" not in done.stderr


def by_key(prompt, response, target):
    return {}[response]


async def later(prompt, response, target):
    await asyncio.sleep(0)
    return 1 / len(target)


class Callable:
    def __call__(self, prompt, response, target):
        raise RuntimeError


def listed(prompt, response, target):
    return [1.0]


class Whole:
    async def score_group(self, prompt, responses, target):
        raise OSError("gone")


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (by_key, KeyError),
        (later, ZeroDivisionError),
        (Callable(), RuntimeError),
        (listed, BadScore),
        (Whole(), OSError),
    ],
)
def test_reward_error_names_scored_prompt_and_response(function, kind):
    with pytest.raises(kind) as caught:
        asyncio.run(FunctionVerifier(function).score("2 + 2?", ["four"], ""))
    error = RemoteFailure.capture("reward_actor[0].score", caught.value).to_exception()
    assert type(error) is kind
    [note] = [note for note in error.__notes__ if "scored prompt" in note]
    assert "prompt '2 + 2?', target ''" in note
    assert ("response 'four'" in note) is not isinstance(function, Whole)
    frames = user_frames(error)
    assert all("test_user_errors.py" in frame for frame in frames)
    assert bool(frames) is (function is not listed) or any("test_reward_error" in frame for frame in frames)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("failed: KeyError: 'a'\n\nTraceback", ("failed", "failed: KeyError: 'a'")),
        ("stopped: SIGINT\n", ("stopped", "stopped: SIGINT")),
        (None, ("stopped", "")),
        ("", ("stopped", "")),
        (b"\xff\xfe", ("stopped", "\ufffd\ufffd")),
    ],
)
def test_run_directory_records_why_run_ended(tmp_path: Path, written, expected):
    if written is not None:
        (tmp_path / "ended.txt").write_bytes(written if isinstance(written, bytes) else written.encode())
    assert (read_state(tmp_path), read_ending(tmp_path)) == expected
    (tmp_path / "finished").touch()
    assert read_state(tmp_path) == "finished"
