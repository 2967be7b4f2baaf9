"""The tasks of apps/agent/repair.yaml, and mini-swe-agent at them; FORGE_MINI_PYTHON names a Python that has it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("openai")

from apps.agent import repairs
from forge.types import Prompt, Sample
from forge_agents.command import CommandRunner
from forge_agents.config import AgentConfig
from forge_agents.recipe import command_play
from forge_agents.settings import SessionSettings

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
NAMES = "kqx"
PAIRS = repairs.pairs_of("held out", "recorded", "practised")
FUNCTION, BUG = PAIRS[0]
ROW = repairs.task_row(FUNCTION, BUG, NAMES)
REPAIR = repairs.repair(BUG, NAMES)


REPAIR_AGENT = yaml.safe_load((ROOT / "apps/agent/repair.yaml").read_text())["episode"]["agent"]


def section(**settings):
    """The section `episode.agent` of the recipe."""
    return {**REPAIR_AGENT, "files": str(ROOT / "apps/agent/mini"), **settings}


CONFTEST = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("conftest.py", CONFTEST),
        ("sitecustomize.py", "import os; os._exit(0)"),
        ("pytest.ini", "[pytest]\naddopts=--collect-only"),
    ],
)
def test_documented_pytest_reward_command_ignores_agent_files(name, content, tmp_path):
    block = (ROOT / "docs/agent_gateway.md").read_text().split("```yaml\n")[1].split("```")[0]
    test = yaml.safe_load(block)["episode"]["agent"]["test"]
    words = [sys.executable if word == "python" else word for word in test["command"]]
    (tmp_path / name).write_text(content)
    for body, expected in (("assert False", 1), ("pass", 0)):
        (tmp_path / "test_it.py").write_text(f"def test(): {body}")
        assert subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": "."}, timeout=60).returncode == expected


def bash(command):
    return f"```bash\n{command}\n```"


def spoken(*commands):
    """A script that says one command a turn, by how many the prompt has; what comes before is the agent's own text."""
    return lambda prompt: bash(commands[prompt.count("```bash\n")])


def play(served, *, row=ROW, **settings):
    """The outcome of one episode of the recipe's agent, and its session's record."""
    if "FORGE_MINI_PYTHON" not in os.environ:
        pytest.skip("FORGE_MINI_PYTHON names no Python with mini-swe-agent")
    gateway, run = served
    agent = AgentConfig(**section(readable=[str(Path(os.environ["FORGE_MINI_PYTHON"]).parents[1])], **settings))

    async def run_agent():
        async with CommandRunner() as runner:
            playing = await command_play(agent, runner)
            access = gateway.open(SessionSettings(max_tokens=4000, max_turn_tokens=400, max_turns=8))
            outcome = await playing(access, Sample(Prompt(row["question"], ()), row["answer"]), False)
            record = await asyncio.to_thread(lambda: run(gateway.close(access.key)))
            return outcome, record

    return asyncio.run(run_agent())


def test_correct_agent_code_repair_scores_1_and_records_conversation(served, forced_policy):
    forced_policy.script = spoken(f"cat {repairs.FILE}", REPAIR, repairs.SUBMIT)
    outcome, record = play(served)
    assert (outcome.reward, outcome.stop) == (1.0, "exited"), outcome.info
    episode = record.episode("policy", outcome.reward)
    messages = [{name: message[name] for name in ("role", "content")} for message in episode.info["messages"]]
    assert messages == repairs.recorded(FUNCTION, BUG, NAMES)
    assert episode.info["roots"] == {"start": 1}
    assert episode.info["certificate"]["trained"] == forced_policy.sampled


@pytest.mark.parametrize(
    "commands",
    [
        ["true"],
        [REPAIR.replace("sed -i", "sed")],
        ["echo 'import sys; sys.exit(0)' > judge.py; chmod 400 judge.py"],
        ["mkdir judge.py; touch judge.py/file; chmod 0 judge.py"],
        ["ln -s /task/other.py judge.py; touch other.py"],
        ["ln -s /usr/bin/true judge.py"],
        ["mkfifo judge.py"],
        ["echo 'import os; os._exit(0)' > fix.py"],
        ["echo 'import sys; sys.exit(0)' > subprocess.py; cp subprocess.py json.py; cp subprocess.py sitecustomize.py"],
        ["mkdir bin; printf '#!/bin/sh\\nexit 0\\n' > bin/python3; chmod +x bin/python3; cp bin/python3 python3"],
        ["rm -rf * .home; chmod 0 ."],
    ],
)
def test_broken_agent_code_repair_scores_0(served, forced_policy, commands):
    forced_policy.script = spoken(*commands, repairs.SUBMIT)
    outcome, _ = play(served)
    assert (outcome.reward, outcome.is_lost) == (0.0, False), outcome.info


def test_endless_agent_code_repair_times_out_with_score_0(served, forced_policy):
    forced_policy.script = spoken(f"echo 'while True: pass' > {repairs.FILE}", repairs.SUBMIT)
    outcome, _ = play(served)
    assert (outcome.reward, outcome.is_lost) == (0.0, False)
    assert "TimeoutExpired" in outcome.info["test"]
