"""Whole runs whose episodes are played by agents that know only their vendor's client."""

import asyncio
import itertools
import os
import sys

import pytest

pytest.importorskip("openai")

import forge
from benchmarks import agent_soak
from benchmarks.machine import descendants
from forge.config import ConfigError
from forge.recipes.launch import BadInput
from forge_agents.record import EXCLUSIONS
from forge_inspect.account import account_text, token_account
from forge_inspect.runs import read_metric_rows
from forge_inspect.watch.views import RunView

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_server")]

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
SETTINGS = {
    "from_scratch": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 128},
    "dataset": {"task": "apps.toys.expressions:Expression", "difficulty": [2, 2]},
    "training": {"batch_size": 2, "steps": 2, "learning_rate": 1e-3, "seq_len": 256},
    "grpo": {"n_samples": 3, "max_tokens": 8},
}
PROGRAM = """
import os, sys
from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    content = reply.choices[0].message.content
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "sure?"}]
with open("answer.txt", "w") as file:
    file.write(content)
"""
# Passes the answers that have an odd number of characters.
TEST = "import sys; sys.exit(1 - len(open('answer.txt').read()) % 2)"


def run(root, agent, **settings):
    """A run in `root` whose episodes the agent plays; its metrics, with the certificates checked."""
    episode = {"max_turns": 3, "max_tokens": 96, "template": TEMPLATE, "agent": agent}
    values = {**SETTINGS, "episode": episode, "run": {"name": "run", "root": str(root)}, **settings}
    metrics = forge.train(None, **values).metrics
    counted = [row for row in metrics if "certificate/sampled" in row]
    assert counted
    for row in counted:
        excluded = sum(row.get(f"certificate/{name}", 0) for name in EXCLUSIONS)
        assert row["certificate/sampled"] == row["certificate/trained"] + excluded
    assert sum(row["certificate/trained"] for row in counted) > 0
    assert metrics[-1]["step"] == 2
    return metrics


async def chat(client, sample):
    """Asks twice, and rewards answers with an odd number of characters."""
    messages = [{"role": "user", "content": sample.prompt.text}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        content = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "sure?"}]
    return float(len(content) % 2)


def test_agent_program_run_is_scored_by_test_command(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (files / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "{task}"]
    metrics = run(
        tmp_path,
        {"command": command, "files": str(files), "test": {"command": [sys.executable, "-c", TEST]}},
        grpo={"n_samples": 2, "max_tokens": 8},
        eval={"problems": 2},
    )
    assert {row["episode/turns"] for row in metrics if "episode/turns" in row} == {2}
    assert all(row.get("episode/infrastructure", 0) == 0 for row in metrics)


@pytest.mark.full
def test_token_accounting_of_resumed_run_counts_steps_once(tmp_path):
    plays = itertools.count()
    marker = tmp_path / "failed"  # what a closure holds is copied into each run

    async def fail_once(client, sample):
        # After the third step, whose checkpoint is that of the second.
        if next(plays) == 23 and not marker.exists():
            marker.touch()
            while read_metric_rows(tmp_path / "run")[-1]["step"] < 3:  # it is logged while this step is played
                await asyncio.sleep(0.01)
            raise RuntimeError("the first attempt ends here")
        # A group that ends while a checkpoint is written is in its buffer, and in the row of the step after it.
        await asyncio.sleep(0.2)
        return await chat(client, sample)

    settings = {
        "metrics": {"rollouts": "all"},
        "checkpoint": {"every": 2},
        "training": {**SETTINGS["training"], "steps": 4},
        "async": {"max_policy_age": 0},
    }
    episode = {
        "max_turns": 3,
        "max_tokens": 96,
        "template": TEMPLATE,
        "agent": {"function": fail_once, "on_error": "raise"},
    }
    values = {**SETTINGS, **settings, "episode": episode, "run": {"name": "run", "root": str(tmp_path)}}
    with pytest.raises(RuntimeError, match="first attempt"):
        forge.train(None, **values)
    assert token_account(read_metric_rows(tmp_path / "run"))["sampled"] > 0
    assert read_metric_rows(tmp_path / "run")[-1]["step"] == 3
    forge.train(None, resume="auto", **values)
    view = RunView(tmp_path / "run")
    account = token_account(view.rows)
    # Each of the four steps has 2 groups of 3 episodes, and each token of them was recorded with its rollout.
    kept = [view.rollout(number) for number in range(view.rollouts({})["all"])]
    assert len(kept) == 4 * 2 * 3
    assert account["sampled"] == account["trained"] == sum(sum(row["mask"]) for row in kept)
    assert account["trained"] == account["batch"] + account["idle"]
    text = view.about()["account"]
    assert text.startswith(f"{account['sampled']:,} sampled = {account['trained']:,} trained; of the trained ")
    assert text in (tmp_path / "run/report.html").read_text()


def test_unbalanced_token_accounting_is_reported():
    row = {"certificate/sampled": 10, "certificate/trained": 6, "certificate/orphan": 3, "certificate/batch": 4}
    assert account_text(token_account([row, row])) == (
        "20 sampled is not 12 trained + 6 orphan (2 tokens too few); of the trained 8 in a step, 4 in groups that were "
        "dropped or wait"
    )


def test_missing_agent_program_ends_run_with_one_line_error(tmp_path):
    with pytest.raises(BadInput, match=r"episode\.agent\.command: \./no-such-agent cannot be executed.*readable"):
        run(tmp_path, {"command": ["./no-such-agent"], "reward": "ExactMatch"})


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ({"comand": ["true"]}, r"episode\.agent\.comand.*command"),
        (
            {"command": ["true"], "function": chat},
            "needs one of command, function and collection, got command, function",
        ),
        ({"command": ["true"]}, "needs either a test or a reward"),
        ({"command": ["true"], "test": {"command": ["true"]}, "reward": "ExactMatch"}, "either a test or a reward"),
        ({"function": "apps.agent.main:plya"}, r"episode\.agent\.function .* was not found"),
        ({"command": ["true"], "test": {"command": ["true"]}, "files": "nowhere"}, "files must be a directory"),
    ],
)
def test_invalid_agent_settings_raise(tmp_path, agent, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        run(tmp_path, agent)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_agent_run_with_killed_processes_trains_each_token_once(tmp_path):
    numbers = itertools.count()
    victims = {5: "trainer", 40: "generator", 70: "gateway"}
    of_other_tests = descendants(os.getpid())

    async def lossy(client, sample):
        victim = victims.get(next(numbers))
        playing = asyncio.create_task(agent_soak.play(client, sample))
        if victim is not None:
            await asyncio.sleep(0.02)
            assert agent_soak.kill(victim, spared=of_other_tests)
        return await playing

    settings = agent_soak.settings(tmp_path, steps=6, agents=16)
    settings["episode"]["agent"]["function"] = lossy
    settings["checkpoint"]["every"] = 2
    rows = forge.train(None, **settings).metrics
    assert agent_soak.check(tmp_path / "soak")["episodes"] == 6 * 8 * 4
    for name in ("trainer", "generator", "gateway_actor"):
        assert sum(row.get(f"restarts/{name}", 0) for row in rows) == 1
