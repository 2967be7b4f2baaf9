"""Task folders of Harbor: what is read of them, and episodes of real programs in them."""

import asyncio
import json
import os
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("openai")

from forge.config import ConfigError
from forge.types import Prompt, Sample
from forge_agents.agent import CommandResult
from forge_agents.collection import read_rows
from forge_agents.command import CommandRunner
from forge_agents.config import AgentConfig
from forge_agents.harbor import HarborPlay
from forge_agents.harbor_task import read_task, reward_of
from forge_agents.settings import Access, SessionSettings

pytestmark = pytest.mark.processes

SETTINGS = """
schema_version = "1.4"
[verifier]
timeout_sec = 20.0
env = {EXPECTED = "hello"}
[agent]
timeout_sec = 30
[environment]
memory_mb = 1024
env = {COLOUR = "blue"}
"""
DOCKERFILE = """
# comment
FROM ubuntu:24.04
ENV GREETING="good day" MOOD=calm
WORKDIR /app
COPY src/ .
COPY --chown=1:1 table.csv \\
    /data/in/
CMD ["bash"]
"""
INSTRUCTION = "<!-- harbor-canary GUID 1 -->\n# canary 2\n\nWrite hello into answer.txt.\n"
TEST = """#!/bin/sh
echo "$GREETING $COLOUR $EXPECTED $(cat /data/in/table.csv) $(cat /app/given.txt) $(pwd)"
if [ "$(cat answer.txt)" = "$EXPECTED" ] && [ -f /tests/more/list ]; then echo 1 > /logs/verifier/reward.txt
else echo 0.25 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with one task."""
    task = tmp_path / "tasks/hello"
    for name, text in {
        "task.toml": SETTINGS,
        "instruction.md": INSTRUCTION,
        "environment/Dockerfile": DOCKERFILE,
        "environment/src/given.txt": "given",
        "environment/table.csv": "1,2",
        "tests/test.sh": TEST,
        "tests/more/list": "",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return task


def play(folder, command, url=None, **args):
    """The outcome of an episode of the folder's task."""
    agent = AgentConfig(
        command=command, collection={"kind": "harbor", "environment": str(folder.parent), "args": args}, timeout=60
    )

    async def run():
        access = Access("http://127.0.0.1:9", "key") if url is None else url
        (row,) = (await read_rows(agent))["train"]
        assert row == {"question": "Write hello into answer.txt.\n", "answer": {"task": "hello"}}
        async with CommandRunner() as runner:
            harbor = HarborPlay(agent, runner)
            try:
                return await harbor(access, Sample(Prompt("", ()), json.dumps(row["answer"])))
            finally:
                harbor.scratch.close()

    return asyncio.run(run())


def test_a_task_is_read(folder):
    task = read_task(folder)
    assert task.instruction == "Write hello into answer.txt.\n"
    assert task.env == {"PWD": "/app", "GREETING": "good day", "MOOD": "calm", "COLOUR": "blue"}
    assert task.test_env == {"EXPECTED": "hello"}
    assert (task.timeout, task.test_timeout, task.memory_mb) == (30, 20.0, 1024)
    assert task.links()["/app"] == "."
    assert task.links()["/data"] == ".harbor/root/data"


def test_the_reward_is_that_of_the_test(folder):
    command = ["sh", "-c", "cat given.txt /data/in/table.csv; echo $MOOD > mood; printf hello > /app/answer.txt"]
    outcome = play(folder, command)
    assert outcome.reward == 1.0
    assert outcome.stop == "exited"
    assert outcome.info["stdout"] == "given1,2"
    assert outcome.info["test"] == "good day blue hello 1,2 given /app\n"
    assert play(folder, ["true"]).reward == 0.25


def test_an_agent_uses_the_gateway(folder, served, forced_policy):
    gateway, run = served
    forced_policy.script = lambda prompt: "hello" if "Write hello" in prompt else None
    program = (
        "import os, sys; from openai import OpenAI; messages = [{'role': 'user', 'content': sys.argv[1]}];"
        "reply = OpenAI().chat.completions.create(model=os.environ['OPENAI_MODEL'], messages=messages);"
        "open('answer.txt', 'w').write(reply.choices[0].message.content)"
    )
    access = gateway.open(SessionSettings(max_tokens=1000, max_turn_tokens=24))
    outcome = play(folder, [sys.executable, "-c", program, "{task}"], access)
    episode = run(gateway.close(access.key)).episode("policy", outcome.reward)
    assert outcome.reward == 1.0
    assert episode.info["certificate"]["trained"] == forced_policy.sampled > 0


@pytest.mark.parametrize(
    "trick",
    [
        "echo 1 > /logs/verifier/reward.txt",
        "mkdir .harbor/tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests/test.sh",
        "rm -rf .harbor; mkdir own; ln -s /task/own .harbor",
        "rm -rf .harbor/logs; ln -s /etc .harbor/logs",
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json; chmod 500 /logs/verifier; chmod 000 .harbor/logs",
        "rm -rf .harbor/logs/verifier; echo 1 > .harbor/logs/verifier",
        "sh -c 'sleep 2; while true; do echo 1 > /logs/verifier/reward.txt; done' & true",
    ],
)
def test_an_agent_cannot_write_its_reward(folder, trick):
    outcome = play(folder, ["sh", "-c", trick])
    assert outcome.reward == 0.25


def test_tests_that_give_no_reward_leave_an_episode_unscored(folder):
    (folder / "tests/test.sh").write_text("#!/bin/sh\necho no pytest here; exit 1\n")
    outcome = play(folder, ["true"])
    assert (outcome.reward, outcome.stop, outcome.is_lost) == (None, "infrastructure", False)
    assert outcome.info["test"] == "no pytest here\n"
    assert outcome.info["reason"] == "the tests wrote no /logs/verifier/reward.txt or reward.json"


@pytest.mark.parametrize(
    ("files", "name", "reward"),
    [
        ({"reward.txt": "0.5\n"}, None, 0.5),
        ({"reward.json": '{"reward": 1, "style": 0}'}, None, 1.0),
        ({"reward.json": '{"style": 0.5}'}, None, 0.5),
        ({"reward.json": '{"a": 1, "b": 2}'}, "b", 2.0),
        ({"reward.json": "0.75", "reward.txt": "1"}, None, 0.75),
        ({"reward.json": '{"a": 1, "b": 2}'}, None, r"has a, b: name one by args\.reward"),
        ({"reward.json": "{}"}, None, "has nothing"),
        ({"reward.json": '{"reward": NaN}'}, None, "nan, not a finite number"),
        ({"reward.json": '{"reward": true}'}, None, "True, not a finite number"),
        ({"reward.json": "{"}, None, "Expecting"),
        ({"reward.txt": ""}, None, "could not convert"),
        ({"reward.txt": "inf"}, None, "inf, not a finite number"),
        ({}, None, r"no /logs/verifier/reward\.txt"),
    ],
)
def test_rewards_of_the_tests(tmp_path, files, name, reward):
    verifier = tmp_path / ".harbor/logs/verifier"
    verifier.mkdir(parents=True)
    for path, text in files.items():
        (verifier / path).write_text(text)
    result = CommandResult("exited", 0, "", "", 0.0, tmp_path)
    if isinstance(reward, float):
        assert reward_of(result, name) == reward
    else:
        with pytest.raises(ValueError, match=reward):
            reward_of(result, name)


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (
            "environment/Dockerfile",
            "FROM a\nRUN apt-get update && \\\n  apt-get install -y git\n",
            r"RUN apt-get .*\[RUN\]",
        ),
        ("environment/Dockerfile", "FROM a AS b\nFROM c\n", r"several stages needs a container.*\[stages\]"),
        ("environment/Dockerfile", "FROM a\nCOPY ../secret .\n", "not a path below environment"),
        ("environment/Dockerfile", "FROM a\nCOPY nothing .\n", "COPY nothing is not in environment"),
        ("environment/Dockerfile", "FROM a\nCOPY table.csv /etc/passwd\n", "/etc is of the system"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /work/deep\nCOPY src ..\n", "holds the working folder /work/deep"),
        ("environment/Dockerfile", "FROM a\nCOPY passwd .\n", "COPY passwd leads out of environment"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /usr/src\n", "/usr/src is of the system"),
        ("environment/Dockerfile", "FROM a\nENV A=$B\n", "refers to other variables"),
        ("environment/docker-compose.yaml", "", r"docker-compose\.yaml needs a container"),
        ("task.toml", "[environment]\ngpus = 1\n", r"environment\.gpus needs a container"),
        ("task.toml", "[environment]\ndocker_image = 'a'\n", r"docker_image needs a container"),
        ("task.toml", "[environment]\nenv = {TOKEN = '${HOME}'}\n", r"asks for a variable of this machine"),
        ("task.toml", "[environment]\nos = 'windows'\n", "must be linux"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", r"separate needs a container.*\[separate\]"),
        ("task.toml", "[[steps]]\nname = 'one'\n", "several steps"),
        ("task.toml", "[environment\n", "task folder .*hello: "),
        ("trajectory.json", "{}", r"trajectory\.json is unsupported"),
        ("tests/test.sh", None, r"no tests/test\.sh"),
        ("instruction.md", None, r"no instruction\.md"),
    ],
)
def test_tasks_that_need_a_container_are_one_line(folder, file, text, problem):
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    (folder / "environment/passwd").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=problem) as caught:
        read_task(folder)
    assert "\n" not in str(caught.value)


def test_what_needs_a_container_may_be_ignored(folder):
    (folder / "environment/Dockerfile").write_text("FROM a\nRUN make\nWORKDIR /work/deep\nCOPY table.csv ../in/\n")
    task = read_task(folder, ["RUN"])
    assert task.links()["/work/deep"] == "."
    assert task.links()["/work/in"] == ".harbor/root/work/in"
    with pytest.raises(ConfigError, match="needs the command that solves its tasks"):
        AgentConfig(collection={"kind": "harbor", "environment": str(folder)})
    with pytest.raises(ConfigError, match="is not a folder with task folders"):
        play(folder.parent.parent / "no/task", ["true"])


def harbor_python():
    """The Python that has the package harbor."""
    if "FORGE_HARBOR_PYTHON" not in os.environ:
        pytest.skip("FORGE_HARBOR_PYTHON names no Python with harbor")
    return os.environ["FORGE_HARBOR_PYTHON"]


READ = """
import json, sys
from harbor.models.task.task import Task
task = Task(sys.argv[1])
config = task.config
print(json.dumps([
    task.instruction, config.agent.timeout_sec, config.verifier.timeout_sec, config.environment.memory_mb,
    config.environment.env, config.verifier.env,
]))
"""


def test_harbor_itself_reads_the_same(folder):
    done = subprocess.run(
        [harbor_python(), "-c", READ, str(folder)], capture_output=True, text=True, timeout=120, check=True
    )
    task = read_task(folder)
    env = {"COLOUR": task.env["COLOUR"]}
    expected = [task.instruction, task.timeout, task.test_timeout, task.memory_mb, env, task.test_env]
    assert json.loads(done.stdout) == expected


def test_a_task_that_harbor_makes_is_read_and_played(tmp_path):
    program = os.path.join(os.path.dirname(harbor_python()), "harbor")
    settings = {**os.environ, "HARBOR_TELEMETRY": "0"}
    words = ["init", "--task", "acme/hello", "--verifier-mode", "shared", "--no-pytest", "--include-canary-strings"]
    subprocess.run([program, *words, "-o", str(tmp_path)], env=settings, capture_output=True, timeout=120, check=True)
    task = tmp_path / "hello"
    assert tomllib.loads((task / "task.toml").read_text())["verifier"]["environment_mode"] == "shared"
    (task / "instruction.md").write_text("Write hello into answer.txt.\n")
    with open(task / "tests/test.sh", "a") as file:
        file.write("\ngrep -c hello answer.txt > /logs/verifier/reward.txt\n")
    assert play(task, ["sh", "-c", "echo hello > answer.txt"]).reward == 1.0
    assert play(task, ["touch", "answer.txt"]).reward == 0.0
