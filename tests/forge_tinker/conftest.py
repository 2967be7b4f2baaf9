"""A server of the Tinker protocol as its command starts it, and clients of the real SDK."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from forge.models import build_small_model

tinker = pytest.importorskip("tinker")

ALPHABET = "abcdefghijklmnopqrstuvwxyz> "


@pytest.fixture(scope="session")
def base_model(tmp_path_factory):
    return build_small_model(str(tmp_path_factory.mktemp("tinker") / "model"), alphabet=ALPHABET, layers=2)


class Server:
    """`forge tinker` in a process; `kill` and `start` it again at the same address and folder."""

    def __init__(self, model, folder, *options):
        self.model, self.folder, self.options, self.port = model, folder, options, 0
        self.start()

    def start(self):
        command = [
            sys.executable,
            "-c",
            "from forge.cli import main; main()",
            "tinker",
            "--model",
            self.model,
            "--port",
            str(self.port),
        ]
        self.process = subprocess.Popen(
            [*command, "--model", self.model, "--port", str(self.port), "--folder", str(self.folder), *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if match := re.search(r"is served at (http://\S+:(\d+)):", line):
                self.url, self.port = match[1], int(match[2])
                return
        raise AssertionError("".join(lines))

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def serve(model, folder, *options):
    server = Server(model, folder, *options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def server(base_model, tmp_path_factory):
    with serve(base_model, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key="tml-tests") as client:
        yield client


def encode(text):
    """The tokens of a text: the alphabet's numbers begin at 3."""
    return [ALPHABET.index(character) + 3 for character in text]


def make_datum(text, prompt, **inputs):
    """A datum whose targets are the text's next tokens; by default of weight 1 after the first `prompt` ones."""
    tokens = encode(text)
    weights = [0.0] * (prompt - 1) + [1.0] * (len(tokens) - prompt)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **(inputs or {"weights": weights})},
    )
