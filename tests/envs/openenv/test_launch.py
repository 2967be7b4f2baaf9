"""Servers as processes: started, watched, killed, stopped, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.envs import Action, Dialogue, InfrastructureError, rollout
from forge.envs.openenv import LocalServer, OpenEnvClient, OpenEnvEnvironment
from forge.envs.process import Program

ROOT = Path(__file__).parents[3]
SERVE = [sys.executable, "-m", "forge.envs.openenv", "tests.envs.openenv.counting:Counting", "--port", "{port}"]
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


def test_a_server_killed_in_the_middle_of_an_episode():
    async def main():
        server = await LocalServer.start(SERVE, cwd=ROOT)
        async with OpenEnvClient(server.url) as client:
            env = OpenEnvEnvironment(client)
            first = await env.reset(None, seed=1)
            await env.step(Action("x"))
            os.kill(first.info["pid"], signal.SIGKILL)
            with pytest.raises(InfrastructureError):
                await env.step(Action("x"))
            await asyncio.sleep(0.3)
            with pytest.raises(InfrastructureError, match="was ended by SIGKILL; its log ends with"):
                server.check()
            await server.stop()
            async with await LocalServer.start(SERVE, cwd=ROOT, port=int(server.url.rpartition(":")[2])):
                again = await env.reset(None, seed=2)
                assert again.info["pid"] != first.info["pid"]
                return (await env.step(Action("x"))).messages[0]["content"]

    assert asyncio.run(main()) == "turn 1 of 2: x"


def test_an_episode_that_lost_its_server_is_played_again(scripted, bpe):
    says = scripted("one", "two", "one", "end")

    async def main():
        server = await LocalServer.start(SERVE, cwd=ROOT)

        async def route(tokens, **sampling):
            nonlocal server
            if len(says.asked) == 1:
                os.killpg(server.pid, signal.SIGKILL)
                await server.stop()
                server = await LocalServer.start(SERVE, cwd=ROOT, port=int(server.url.rpartition(":")[2]))
            return await says.generate.route(tokens, **sampling)

        async with OpenEnvClient(server.url) as client:
            policy = SimpleNamespace(generate=SimpleNamespace(route=route))
            env = OpenEnvEnvironment(client)
            episode = await rollout(policy, env, None, dialogue=Dialogue(bpe, "chatml"), seed=1)
        await server.stop()
        return episode

    episode = asyncio.run(main())
    assert (episode.reward, episode.info["attempts"], episode.info["stop"]) == (3.0, 2, "terminated")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('no such level'); raise SystemExit(3)", r"ended with exit code 3; its log ends with:\nno such level"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("import time; print('loading', flush=True); time.sleep(60)", r"within 1 s; .* still runs; .*\nloading"),
    ],
)
def test_a_server_that_does_not_come_up(code, why):
    with pytest.raises(InfrastructureError, match=why):
        asyncio.run(LocalServer.start([sys.executable, "-S", "-c", code, "{port}"], limit=1.0))


def test_a_command_that_is_none():
    with pytest.raises(InfrastructureError, match="there-is-no-such-program: No such file"):
        asyncio.run(LocalServer.start(["there-is-no-such-program", "{port}"]))
    with pytest.raises(ValueError, match=r"must say \{port\}"):
        asyncio.run(LocalServer.start(["sleep", "1"]))
    with pytest.raises(ValueError, match="a list of its words"):
        asyncio.run(LocalServer.start("serve {port}", port=1))


def test_stopping_ends_what_ignores_it():
    async def main():
        program = await Program.start([sys.executable, "-S", "-c", BARE, "stubborn", "0"])
        while "serving" not in program.tail():
            await asyncio.sleep(0.02)
        pid = program.pid
        await program.stop(0.2)
        await program.stop()
        return pid

    assert gone(asyncio.run(main()))


def test_a_program_ends_with_what_keeps_it():
    async def main():
        program = await Program.start([sys.executable, "-S", "-c", BARE, "stubborn", "0"])
        while "serving" not in program.tail():
            await asyncio.sleep(0.02)
        os.kill(program.pid, signal.SIGKILL)
        assert gone(program.pid)
        await program.stop()

    asyncio.run(main())


def test_a_server_ends_with_this_process():
    script = f"""
import asyncio, sys
from forge.envs.openenv import LocalServer
async def main():
    server = await LocalServer.start([sys.executable, "-S", "-c", {BARE!r}, "stubborn", "{{port}}"])
    print(server.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        pid = int(parent.stdout.readline())
        assert not gone(pid, 0.1)
        parent.kill()
    assert gone(pid)
