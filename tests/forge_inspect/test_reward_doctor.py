"""The reward doctor finds what a reward does wrong, and leaves a good one only."""

from contextlib import closing

import pytest

from forge.cli import main
from forge_inspect.reward_doctor import examine
from forge_inspect.reward_doctor.calls import Case, RewardProcess

pytestmark = pytest.mark.processes

SUMS = [(3, 4), (12, 30), (7, 9), (100, 23), (55, 6), (81, 14), (2, 17), (9, 80)]
CASES = [Case(f"What is {a} + {b}?", str(a + b), {"solution": str(a + b)}) for a, b in SUMS]

REWARDS = '''
import itertools, os, random, re, time

counter = itertools.count()


def good(prompt, response, target):
    """The last number, if it is marked, and nothing else is marked."""
    if not target:
        return None
    marked = re.findall(r"####\\s*(-?[0-9]+)\\s*$", response)
    return float(marked == [target] and response.count("####") == 1)


def contains(prompt, response, target):
    return float(bool(target) and target in response)


def first_number(prompt, response, target):
    return float(re.findall(r"[0-9]+", response)[0] == target)  # IndexError without a number


def length(prompt, response, target):
    return min(len(response), 100) / 100


def hangs(prompt, response, target):
    if len(response) > 100_000:
        time.sleep(60)
    return good(prompt, response, target)


def exits(prompt, response, target):
    if "os._exit" in response:
        os._exit(0)
    return good(prompt, response, target)


def noisy(prompt, response, target):
    return None if not target else good(prompt, response, target) + 0.001 * next(counter)


def empty_is_right(prompt, response, target):
    return float(response.split()[-1:] == target.split()[-1:])


def unknown(prompt, response, target):
    return float("nan")


def judge(prompt, response, target):
    return 1.0 if "highest score" in response else good(prompt, response, target)


def ranked(responses, target):
    """The first right answer of a group only."""
    seen = False
    rewards = []
    for response in responses:
        is_right = bool(target) and target in response
        rewards.append(None if not target else float(is_right and not seen))
        seen = seen or is_right
    return rewards
'''


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    (tmp_path / "examined_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "examined_rewards"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "severity", "kind", "text"),
    [
        ("contains", "doubt", "hedge", "a list of answers earns what a right one does"),
        ("contains", "doubt", "hedge", "a negation"),
        ("first_number", "fault", "raises", "IndexError"),
        ("length", "fault", "blind", "does not tell them apart"),
        ("hangs", "fault", "hangs", "no answer within 1 s"),
        ("exits", "fault", "ends", "its process ended with 0"),
        ("noisy", "doubt", "random", "the same answers earn different rewards"),
        ("empty_is_right", "fault", "target", "an empty answer to a row with an empty target earns 1.000"),
        ("judge", "fault", "injection", "an instruction earns what a right one does"),
        ("ranked", "fault", "order", "depend on the order"),
        ("unknown", "fault", "unscored", "no right answer is scored, in any form"),
    ],
)
def test_reward_doctor_names_each_fault_of_faulty_rewards(rewards, name, severity, kind, text):
    result = examine(f"{rewards}:{name}", CASES, limit=1.0)
    findings = [finding for finding in result.findings if finding.kind == kind and text in finding.text]
    assert findings, [finding.line for finding in result.findings]
    assert findings[0].severity == severity


def test_reward_doctor_finds_nothing_in_good_reward(rewards):
    result = examine(f"{rewards}:good", CASES)
    assert [finding.line for finding in result.findings if finding.severity != "note"] == []
    assert (result.right, result.wrong) == (1.0, 0.0)
    # What it does not read is said: forms that are not marked.
    assert {finding.kind for finding in result.findings} <= {"form"}


def test_reward_doctor_replaces_hung_reward_process(rewards):
    with closing(RewardProcess(f"{rewards}:hangs", limit=0.5)) as process:
        assert process.call(CASES[0], ["#### 7"]).rewards == (1.0,)
        assert "no answer within" in process.call(CASES[0], ["9" * 200_000]).error
        assert process.call(CASES[0], ["#### 7", "#### 8"]).rewards == (1.0, 0.0)


def test_forge_doctor_reward_command_reports_faults(rewards, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "What is {a} + {b}?", "answer": "{a + b}"}}\n' for a, b in SUMS))
    main(["doctor", "reward", f"{rewards}:good", "--data", str(rows)])
    assert "right answers earn 1.000, answers of other rows 0.000" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["doctor", "reward", f"{rewards}:first_number", "--data", str(rows)])
    assert "fault: raises on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["doctor", "reward"], "name a reward and rows"),
        (["doctor", "reward", "nope:x", "--data", "rows.jsonl"], "nope:x. was not found"),
        (["doctor", "reward", "ExactMatch", "--data", "rows.jsonl"], "rows.jsonl"),
    ],
)
def test_invalid_forge_doctor_reward_input_raises(words, problem):
    with pytest.raises(SystemExit, match=problem) as caught:
        main(words)
    assert "\n" not in str(caught.value)
