"""Servers in containers: the real docker client against a stand-in of its daemon, which runs images as processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from forge.envs import Action, InfrastructureError
from forge_envs.openenv import OpenEnvClient, OpenEnvEnvironment
from forge_envs.openenv.container import ContainerServer

ROOT = Path(__file__).parents[3]
IMAGES = {
    "counting": [sys.executable, "-m", "forge_envs.openenv", "tests.forge_envs.openenv.counting:Counting", "--port"],
    "broken": [sys.executable, "-c", "import sys; sys.exit('no such module')"],
    "silent": [sys.executable, "-c", "import time; time.sleep(600)"],
}
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker client"),
]


class Daemon:
    """What `docker run --detach`, `port`, `inspect`, `logs` and `rm --force` ask of a daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: dict[str, Any] = {}
        self.ports: dict[str, int] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def app(self) -> web.Application:
        app = web.Application()
        for method, path, handler in (
            ("*", "/_ping", self.ping),
            ("POST", "/containers/create", self.create),
            ("POST", "/containers/{name}/start", self.start),
            ("GET", "/containers/{name}/json", self.inspect),
            ("GET", "/containers/{name}/logs", self.logs),
            ("DELETE", "/containers/{name}", self.remove),
        ):
            app.router.add_route(method, path, handler)
            app.router.add_route(method, "/v{version}" + path, handler)
        return app

    async def ping(self, _: web.Request) -> web.Response:
        return web.Response(text="OK", headers={"API-Version": "1.50", "OSType": "linux"})

    async def create(self, request: web.Request) -> web.Response:
        settings = await request.json()
        if settings["Image"] not in IMAGES:
            return web.json_response({"message": f"No such image: {settings['Image']}"}, status=400)
        self.asked[request.query["name"]] = settings
        return web.json_response({"Id": request.query["name"], "Warnings": []}, status=201)

    async def start(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.ports[name] = free.getsockname()[1]
        command = IMAGES[self.asked[name]["Image"]]
        command = [*command, str(self.ports[name])] if command[-1] == "--port" else command
        log = (self.folder / name).open("wb")
        variables = dict(item.split("=", 1) for item in self.asked[name]["Env"] or [])
        self.running[name] = subprocess.Popen(  # noqa: ASYNC220 - `remove` waits for it
            command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | variables, start_new_session=True
        )
        return web.Response(status=204)

    async def inspect(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        code = self.running[name].poll()
        state = {"Running": code is None, "ExitCode": code or 0, "Status": "running"}
        ports = {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(self.ports[name])}]}
        config = {"Image": self.asked[name]["Image"], "Tty": True}
        return web.json_response(
            {"Id": name, "Name": name, "State": state, "Config": config, "NetworkSettings": {"Ports": ports}}
        )

    async def logs(self, request: web.Request) -> web.Response:
        return web.Response(body=(self.folder / request.match_info["name"]).read_bytes())

    async def remove(self, request: web.Request) -> web.Response:
        process = self.running.pop(request.match_info["name"], None)
        if process is not None:
            process.kill()
            process.wait()
        return web.Response(status=204)


@asynccontextmanager
async def daemon(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Daemon]:
    """A daemon that docker's clients of this test find."""
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Daemon(Path(folder))
        path = Path(folder) / "docker.sock"
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        monkeypatch.setenv("DOCKER_CONFIG", folder)
        runner = web.AppRunner(stand_in.app())
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        try:
            yield stand_in
        finally:
            for process in stand_in.running.values():
                process.kill()
            await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does, at most a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


def test_a_container_serves_episodes_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with daemon(monkeypatch) as stand_in:
            settings = {"env": {"LEVEL": "3"}, "arguments": ["--memory", "1g"]}
            async with await ContainerServer.start("counting", **settings) as server:
                [asked] = stand_in.asked.values()
                assert asked["Env"] == ["LEVEL=3"]
                assert asked["HostConfig"]["Memory"] == 1 << 30
                assert asked["HostConfig"]["PortBindings"]["8000/tcp"][0]["HostIp"] == "127.0.0.1"
                async with OpenEnvClient(server.url) as client:
                    env = OpenEnvEnvironment(client)
                    step = await env.reset(None, seed=0)
                    assert step.messages
                    await env.step(Action("1", "1"))
                    await env.close()
                await server.check()
            assert stand_in.running == {}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("broken", "ended with exit code 1; its log ends with:\nno such module"),
        ("silent", "silent was not healthy within 3 s"),
        ("missing", "docker run: .*No such image: missing"),
    ],
)
def test_a_server_that_does_not_start_leaves_nothing(image: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with daemon(monkeypatch) as stand_in:
            with pytest.raises(InfrastructureError, match=reason):
                await ContainerServer.start(image, limit=3.0 if image == "silent" else 60.0)
            assert stand_in.running == {}

    asyncio.run(main())


def test_a_container_ends_with_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import asyncio\nfrom forge_envs.openenv.container import ContainerServer\n"
        "async def main():\n    server = await ContainerServer.start('counting')\n"
        "    print(server.name, flush=True)\n    await asyncio.sleep(600)\nasyncio.run(main())"
    )

    async def main() -> None:
        async with daemon(monkeypatch) as stand_in:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, cwd=ROOT
            )
            assert process.stdout is not None
            name = (await process.stdout.readline()).decode().strip()
            assert [*stand_in.running] == [name]
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await until(lambda: not stand_in.running)

    asyncio.run(main())


def test_no_daemon_and_no_client_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(InfrastructureError, match=r"docker run: .*Docker daemon"):
        asyncio.run(ContainerServer.start("counting"))
    with pytest.raises(InfrastructureError, match="no-docker could not be started: No such file or directory"):
        asyncio.run(ContainerServer.start("counting", docker="no-docker"))
