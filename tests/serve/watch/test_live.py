"""Whom the page asks for the policy in training: a server of this user's run alone, and never with the user's key."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forge.observability.runs import SERVED
from forge.serve.watch import Watch
from forge.serve.watch.live import listeners
from forge.system.files import write_atomic
from forge.system.web import API_KEY, bind, guard, listen, web

OWN = "a-key-of-the-run-in-its-folder"
ASKED = {"run": "a", "which": "live", "prompt": "x"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like a run that is running."""
    monkeypatch.setenv(API_KEY, "the-key-of-the-user")
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def told(run: Path, make: Any) -> tuple[int, dict[str, Any], bytes]:
    """The answer to the page, and all that a listener got which `make(port)` lets the folder name."""

    async def go() -> tuple[int, dict[str, Any], bytes]:
        got = b""

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal got
            while b"\r\n\r\n" not in got and (some := await reader.read(4096)):
                got += some
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()

        listener = await asyncio.start_server(hear, "127.0.0.1", 0)
        make(listener.sockets[0].getsockname()[1])
        watch = Watch(run.parent)
        async with (
            asyncio.timeout(60),
            watch.listen(bind("127.0.0.1", 0)) as url,
            aiohttp.ClientSession() as session,
            session.post(f"{url}/api/chat", json=ASKED) as answer,
        ):
            found = answer.status, await answer.json(), got
        listener.close()
        return found

    return asyncio.run(go())


def named(url: str) -> str:
    return json.dumps({"url": url, "key": OWN})


@pytest.mark.parametrize(
    "content",
    [
        '{{"url": "http://127.0.0.1:{port}/v1"}}',
        '{{"url": "http://127.0.0.1:{port}/any/path?q=1&x=", "key": "' + OWN + '"}}',
        '{{"url": "http://127.0.0.1:{port}/v1/", "key": "' + OWN + '"}}',
        '{{"url": "http://127.0.0.1:{port}/v1#", "key": "' + OWN + '"}}',
        '{{"url": "http://user@127.0.0.1:{port}/v1", "key": "' + OWN + '"}}',
        '{{"url": "http://127.0.0.1:{port}/v1\\n", "key": "' + OWN + '"}}',
        '{{"url": "https://127.0.0.1:{port}/v1", "key": "' + OWN + '"}}',
        '{{"url": "http://127.0.0.1.evil.example:{port}/v1", "key": "' + OWN + '"}}',
        '{{"url": "http://0.0.0.0:{port}/v1", "key": "' + OWN + '"}}',
        '{{"url": "http://127.0.0.1:{port}/v1", "key": "x\\r\\nHost: a"}}',
        '{{"url": "http://127.0.0.1:{port}/v1", "key": 5}}',
        '{{"url": ["http://127.0.0.1:{port}/v1"], "key": "' + OWN + '"}}',
        '["http://127.0.0.1:{port}/v1"]',
        "[" * 4000,
        "{{",
        "",
    ],
)
def test_what_a_folder_names_is_not_asked(run: Path, content: str):
    status, found, got = told(run, lambda port: write_atomic(run / SERVED, content.format(port=port), secret=True))
    assert (status, got) == (404, b"")
    assert "\n" not in found["error"]


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_a_file_that_others_read_or_write_is_not_believed(run: Path, mode: int):
    def write(port: int) -> None:
        (run / SERVED).write_text(named(f"http://127.0.0.1:{port}/v1"))
        (run / SERVED).chmod(mode)

    status, found, got = told(run, write)
    assert (status, "of this user alone" in found["error"], got) == (404, True, b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to make a file of another user")
def test_a_file_of_another_user_is_not_believed(run: Path):
    def write(port: int) -> None:
        write_atomic(run / SERVED, named(f"http://127.0.0.1:{port}/v1"), secret=True)
        os.chown(run / SERVED, 12345, -1)

    status, found, got = told(run, write)
    assert (status, "of this user alone" in found["error"], got) == (404, True, b"")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_read(run: Path, kind: str):
    def write(port: int) -> None:
        if kind == "link":
            write_atomic(run / "other", named(f"http://127.0.0.1:{port}/v1"), secret=True)
            (run / SERVED).symlink_to("other")
        elif kind == "pipe":
            os.mkfifo(run / SERVED, 0o600)
        else:
            (run / SERVED).mkdir(0o700)

    status, _, got = told(run, write)
    assert (status, got) == (404, b"")


def test_the_key_of_the_user_goes_nowhere(run: Path):
    status, _, got = told(
        run, lambda port: write_atomic(run / SERVED, named(f"http://127.0.0.1:{port}/v1"), secret=True)
    )
    assert status == 400
    assert got.startswith(b"POST /v1/completions ")
    assert b"the-key-of-the-user" not in got


def test_a_run_of_this_user_answers_with_its_own_key(run: Path):
    async def answer(request: web.Request) -> web.Response:
        assert (await request.json())["prompt"] == "x"
        choice = {"text": "said", "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 3}})

    async def go() -> tuple[int, Any]:
        app = web.Application(middlewares=[guard("127.0.0.1", "another", OWN)])
        app.add_routes([web.post("/v1/completions", answer)])
        async with listen(app, bind("127.0.0.1", 0)) as served, Watch(run.parent).listen(bind("127.0.0.1", 0)) as url:
            write_atomic(run / SERVED, named(f"{served}/v1"), secret=True)
            async with aiohttp.ClientSession() as session, session.post(f"{url}/api/chat", json=ASKED) as found:
                return found.status, await found.json()

    assert asyncio.run(go()) == (200, {"text": "said", "finish": "stop", "tokens": 3})


def test_the_users_of_a_port_are_seen():
    with bind("127.0.0.1", 0) as at:
        assert listeners(at.getsockname()[1]) == {os.geteuid()}
        port = at.getsockname()[1]
    assert listeners(port) == set()
