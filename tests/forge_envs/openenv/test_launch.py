"""Servers as processes: started, watched, killed, stopped, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_envs import Action, InfrastructureError
from forge_envs.openenv import LocalServer, OpenEnvClient, OpenEnvEnvironment

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
SERVE = [sys.executable, "-m", "tests.forge_envs.openenv.counting", "{port}"]
BARE = """
import http.server, os, sys, time, signal
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers(), self.wfile.write(b'{"status": "healthy"}')
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Healthy).serve_forever()
"""


def gone(pid, limit=10.0):
    """Whether no process of the group is left, zombies aside, within `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        stats = (path.read_text().rpartition(")")[2].split() for path in _stats())
        if not any(int(fields[2]) == pid and fields[0] != "Z" for fields in stats):
            return True
        time.sleep(0.05)
    return False


def _stats():
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (folder / "stat").exists():
            yield folder / "stat"


@pytest.mark.full
async def test_killed_openenv_server_raises_infrastructure_error():
    server = await LocalServer.start(SERVE, cwd=ROOT)
    async with OpenEnvClient(server.url) as client:
        env = OpenEnvEnvironment(client)
        first = await env.reset(None, seed=1)
        await env.step(Action("x"))
        os.kill(first.info["pid"], signal.SIGKILL)
        with pytest.raises(InfrastructureError):
            await env.step(Action("x"))
        await server.stop()
        with pytest.raises(InfrastructureError, match="has ended"):
            await env.step(Action("x"))


@pytest.mark.parametrize(
    ("code", "limit", "why"),
    [
        ("print('no such level'); raise SystemExit(3)", 30.0, r"exit code 3; its log ends with:\nno such level"),
        ("import os; os.kill(os.getpid(), 11)", 30.0, "ended by SIGSEGV"),
        ("import time; time.sleep(60)", 0.5, r"not healthy within 0\.5 s \(.*/health: .*\); its log"),
    ],
)
def test_openenv_server_failing_to_start_raises_with_log(code, limit, why):
    with pytest.raises(InfrastructureError, match=why):
        asyncio.run(LocalServer.start([sys.executable, "-S", "-c", code, "{port}"], limit=limit))


def test_missing_openenv_server_command_raises():
    with pytest.raises(InfrastructureError, match="there-is-no-such-program: No such file"):
        asyncio.run(LocalServer.start(["there-is-no-such-program", "{port}"]))
    with pytest.raises(ValueError, match=r"must contain \{port\}"):
        asyncio.run(LocalServer.start(["sleep", "1"]))
    with pytest.raises(ValueError, match="a list of a program and its arguments"):
        asyncio.run(LocalServer.start("serve {port}"))


@pytest.mark.full
def test_local_openenv_server_ends_with_parent_process():
    script = f"""
import asyncio, sys
from forge_envs.openenv import LocalServer
async def main():
    server = await LocalServer.start([sys.executable, "-S", "-c", {BARE!r}, "stubborn", "{{port}}"])
    print(server.process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        pid = int(parent.stdout.readline())
        assert not gone(pid, 0.1)
        parent.kill()
    assert gone(pid)
