"""Processes that notice by themselves that their controller is lost."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.processes
PROGRAM = """
import logging, sys, threading, time
from forge.runtime.controller import orphans
logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s")
orphans.PAUSE, orphans.CONNECT_TIMEOUT = 0.05, 0.2
orphans.end_with(sys.argv[1])
for thread in threading.enumerate():
    if thread.name == "controller":
        thread.join()
print("no longer watched", flush=True)
"""


@contextmanager
def process_of(controller: tuple[str, int]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with a controller, given by its address."""
    url = "tcp://{}:{}".format(*controller)
    command = [sys.executable, "-c", PROGRAM, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_ends_once_nothing_listens_where_its_controller_did():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with process_of(address) as process:
            for _ in range(4):
                listener.accept()[0].close()
            assert process.poll() is None
            listener.close()
            _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert f"nothing listens at tcp://127.0.0.1:{address[1]} any more: the controller is lost" in errors


def test_a_controller_that_was_never_reached_is_not_lost():
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))  # nothing listens
        with process_of(unbound.getsockname()) as process:
            output, _ = process.communicate(timeout=100)
    assert output == "no longer watched\n"
    assert process.returncode == 0


def test_silence_is_no_sign_of_a_loss():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, process_of(listener.getsockname()) as process:
        listener.accept()[0].close()
        # Nothing is accepted any more: the machine drops what does not fit into its queue.
        assert process.stderr is not None
        unanswered = (line for line in process.stderr if "did not answer: timed out" in line)
        for _ in range(6):
            next(unanswered)
        assert process.poll() is None
