"""Agents that fail: their episodes have no score or the score that was chosen, with the reason, and the run goes on."""

import asyncio
import logging
import math
import os
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("openai")

from forge.config import ConfigError
from forge.recipes.launch import summarise_error
from forge.types import Prompt, Sample
from forge_agents.environment import AgentEnv, Outcome
from forge_agents.recipe import agent_config, check_agent, function_play
from forge_inspect.alerts import list_alerts


def play(served, player, **limits):
    """The episode that an agent plays in a group of one."""
    gateway, run = served

    async def open_session(settings):
        return gateway.open(settings)

    async def close_session(key):
        return await asyncio.to_thread(run, gateway.close(key))

    endpoints = SimpleNamespace(open=SimpleNamespace(route=open_session), close=SimpleNamespace(route=close_session))
    env = AgentEnv(endpoints, player, limits={"max_tokens": 512, **limits}, retries=0)
    (episode,) = asyncio.run(env.play(None, Sample(Prompt("go", (1,)), "go"), 1, 0, evaluation=True))
    return episode


def agent_function(ending, asks=1):
    """A function that asks, and then returns what `ending` does."""

    async def function(client, sample):
        for number in range(asks):
            messages = [{"role": "user", "content": f"{number}"}]
            await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
        return ending()

    return function


def fail():
    raise ValueError("the answer has no number")


@pytest.mark.parametrize(
    ("on_error", "ending", "outcome", "stop", "reason"),
    [
        ("unscored", fail, None, "crashed", "ValueError: the answer has no number"),
        ("zero", fail, 0.0, "crashed", "ValueError: the answer has no number"),
        ("zero", lambda: {}["answer"], 0.0, "crashed", "KeyError: 'answer'"),
        ("zero", lambda: math.nan, None, "ended", "its reward is nan, not a finite number"),
        ("unscored", lambda: {"policy": math.inf}, None, "ended", "its reward is inf, not a finite number"),
        ("unscored", lambda: "good", None, "crashed", "could not convert string to float: 'good'"),
        ("unscored", lambda: sys.exit(5), None, "crashed", "SystemExit: 5"),
        ("unscored", lambda: 0.5, 0.5, "ended", ""),
    ],
)
def test_failed_agent_function_leaves_episode_with_reason(served, caplog, on_error, ending, outcome, stop, reason):
    config = agent_config({"function": agent_function(ending), "on_error": on_error})
    with caplog.at_level(logging.WARNING, "forge"):
        episode = play(served, function_play(config))
    assert (episode.outcome, episode.info["stop"]) == (outcome, stop)
    assert reason in episode.text
    assert len(caplog.messages) == bool(reason)
    assert all(reason in message for message in caplog.messages)


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_agent_function_error_ends_run_if_configured(served, error):
    def fail():
        raise error("mine")

    config = agent_config({"function": agent_function(fail), "on_error": "raise"})
    with pytest.raises(error) as caught:
        play(served, function_play(config))
    assert "mine" in summarise_error(caught.value)


@pytest.mark.parametrize(
    ("asks", "limits", "reached"),
    [
        (6, {"max_turns": 4}, ["max_turns"]),
        (4, {"max_turns": 4}, []),
        (2, {"max_tokens": 9}, ["max_tokens"]),
        (2, {"max_tokens": 512}, []),
    ],
)
def test_reached_episode_limits_are_recorded(served, asks, limits, reached):
    episode = play(served, function_play(agent_config({"function": agent_function(lambda: 1.0, asks)})), **limits)
    assert (episode.info["limits"], episode.info["stop"]) == (reached, (reached or ["ended"])[0])


def test_failed_program_output_is_kept_and_logged_once_per_reason(served, caplog):
    async def crash(access, sample, evaluation):
        return Outcome(None, "timeout", info={"stdout": "step 1\n", "stderr": f"pid {access.key}\nout of luck\n"})

    with caplog.at_level(logging.WARNING, "forge"):
        episode = play(served, crash)
    assert "[stdout] step 1\n[stderr] pid" in episode.text
    assert "failed: timeout: out of luck" in caplog.text


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ({"command": ["python3", "here.py", "{task}"]}, "'here.py' is not in `files`"),
        ({"command": ["python3", "-u", "here.py"]}, "'here.py' is not in `files`"),
        ({"command": ["python3", "nowhere.py"]}, "'nowhere.py' is not in `files`"),
        ({"command": ["./nowhere.sh"]}, "./nowhere.sh cannot be executed"),
        ({"command": ["/no/such/agent"]}, "/no/such/agent cannot be executed"),
        ({"command": ["python3", "given.py"], "files": "given"}, None),
        ({"command": ["sh", "./sub/text.sh"], "texts": {"sub/text.sh": "true"}}, None),
        ({"command": ["sh", "-c", "cat here.py"]}, None),
        ({"command": ["python3", "given.py", "-o", "{folder}/here.py"], "files": "given"}, None),
        ({"command": ["true"], "files": "linked"}, "linked/out must be a file, a directory or a link within linked"),
        ({"command": ["true"], "files": "pipes"}, "pipes/pipe must be a file, a directory or"),
    ],
)
def test_agent_command_with_missing_or_unsafe_files_raises(tmp_path, monkeypatch, agent, problem):
    monkeypatch.chdir(tmp_path)
    for folder in ("given", "linked", "pipes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "given.py").touch()
    (tmp_path / "here.py").touch()
    (tmp_path / "linked/out").symlink_to("/etc")
    (tmp_path / "given/link.py").symlink_to("given.py")
    os.mkfifo(tmp_path / "pipes/pipe")
    values = {**agent, "test": {"command": ["true"]}}
    if problem is None:
        return check_agent(values)
    with pytest.raises(ConfigError, match=problem):
        check_agent(values)


@pytest.mark.parametrize(
    ("shares", "finding"),
    [
        (
            {"crashed": 0.5, "timeout": 0.2, "max_turns": 0.05},
            "50% of the episodes crashed, 20% of the episodes timed out",
        ),
        ({"max_tokens": 0.3}, "30% of the episodes hit episode.max_tokens"),
        ({"crashed": 0.05, "infrastructure": 0.0}, None),
        ({}, None),
    ],
)
def test_agent_failure_alert_reports_share_of_each_cause(shares, finding):
    row = {f"episode/{name}": share for name, share in shares.items()}
    findings = [alert.finding for alert in list_alerts([{"step": step, **row} for step in range(1, 31)], {})]
    assert findings == [finding] * (finding is not None)
