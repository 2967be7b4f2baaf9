"""A small model with a chat template, and two generators that serve it."""

import asyncio
import http.client
import os
import re
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from forge.actors import Generator
from forge.models import build_small_model
from forge.models.tokenizer import PRINTABLE
from forge.runtime.controller import shutdown
from forge_agents.server import ModelServer
from forge_http.web import bind_socket
from tests.recipes.test_recipes import gone, start
from tests.trees import descendants

FORGE = [sys.executable, "-c", "from forge.cli import main; main()"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = build_small_model(
        tmp_path_factory.mktemp("served") / "tiny",
        seed=0,
        alphabet=PRINTABLE,
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=1,
        max_positions=256,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (Path(folder) / "checksums.txt").unlink()
    return folder


@pytest.fixture(scope="session")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


class Served:
    """Two generators and a server in front of them, in the event loop of a thread."""

    def __init__(self, folder, tokenizer):
        self.folder, self.tokenizer, self.started = folder, tokenizer, Future()
        self.thread = Thread(target=lambda: asyncio.run(self.serve()))
        self.thread.start()
        self.loop, self.stop, self.policy, self.address = self.started.result(60)
        self.client = OpenAI(base_url=self.address, api_key="none", max_retries=0, timeout=60)

    async def serve(self):
        stop = asyncio.Event()
        try:
            policy = await Generator.options(num_replicas=2).as_service(str(self.folder), slots=8)
            async with ModelServer(policy, self.tokenizer, "tiny").listen(bind_socket("127.0.0.1", 0)) as url:
                self.started.set_result((asyncio.get_running_loop(), stop, policy, f"{url}/v1"))
                await stop.wait()
        except Exception as error:
            self.started.set_exception(error)
        finally:
            await shutdown()

    def ask(self, method, path, body):
        """The answer as it comes, for what the openai package hides."""
        url = urlsplit(self.address)
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path if path == "/health" else url.path + path, body, headers)
        return connection.getresponse()

    def wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def stats(self):
        return self.wait(self.policy.stats.fanout())

    def busy(self):
        """Sequences that run or wait anywhere."""
        return sum(stats["running"] + stats["waiting"] for stats in self.stats())

    def kill(self):
        for replica in self.policy.status().replicas:
            os.kill(replica.pids[0], signal.SIGKILL)

    def close(self):
        self.client.close()
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(60)


@pytest.fixture(scope="session")
def served(processes, model, tokenizer):
    served = Served(model, tokenizer)
    yield served
    served.close()


@pytest.fixture
def client(served):
    return served.client


def eventually(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)


def address(process):
    """Where it says that it listens."""
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"is served at (\S+)", line):
            return found[1]
    raise AssertionError("".join(said))


@pytest.fixture
def launched(processes):
    """Starts a program; what still runs at the end is killed."""
    processes = []

    def launch(*args):
        processes.append(start(*args, group=True))
        return processes[-1]

    yield launch
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def interrupted(process):
    """The exit code after Ctrl-C, when every process that it had is gone."""
    pids = descendants(process.pid)[1:]
    assert pids
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    eventually(lambda: gone(pids), 5)
    return process.returncode
