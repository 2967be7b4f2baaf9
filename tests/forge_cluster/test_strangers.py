"""Connections to a worker of those who do not know its secret."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forge_cluster.credentials import Credentials
from forge_cluster.wire import connect, receive, send

SECRET = "a secret that is long enough to be one"
FEW = 128  # descriptors of the worker


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))


async def described(address: str, credentials: Credentials) -> dict | None:
    """What a peer with the secret is told."""
    async with asyncio.timeout(60):
        reader, writer = await connect(address, credentials)
        send(writer, {"do": "describe"})
        try:
            return await receive(reader, 30)
        finally:
            writer.close()


@pytest.mark.processes
def test_silent_and_noisy_strangers_lock_nobody_out(tmp_path: Path):
    worker = subprocess.Popen(
        [sys.executable, "-c", "from forge.cli import main; main()", "worker", "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FORGE_SECRET": SECRET},
        preexec_fn=few_descriptors,
    )
    assert worker.stderr is not None
    strangers: list[socket.socket] = []
    try:
        said = next(line for line in worker.stderr if "listening at" in line)
        address = re.search(r"listening at (\S+),", said)[1]  # type: ignore[index]
        host, port = address.split(":")
        (tmp_path / "peer").mkdir(mode=0o700)
        peer = Credentials.make(SECRET, tmp_path / "peer")
        for number in range(300):
            strangers.append(socket.create_connection((host, int(port)), 60))
            if number % 3 == 0:
                strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        answer = asyncio.run(described(address, peer))
        assert answer is not None
        assert "ok" in answer
    finally:
        for stranger in strangers:
            stranger.close()
        worker.terminate()
        log = worker.communicate(timeout=60)[1]
    assert "Traceback" not in log
    assert "out of system resource" not in log
    assert log.count("was not accepted") <= 1
