"""Steps per second of our OpenEnv client and of the `openenv` package's, on the same server, and what they cost.

    pip install openenv && python -P benchmarks/openenv.py

The server is one of the package (`tests/forge_envs/openenv/package_server.py`), or with --ours one of this library.
Each figure is of a process of its own; the clients take turns, so that the machine is the same for both. -P keeps this
file from being imported as the package.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
THEIRS = [sys.executable, "-m", "uvicorn", "tests.forge_envs.openenv.package_server:walk", "--port", "{port}"]
OURS = [sys.executable, "-m", "forge_envs.openenv", "tests.forge_envs.openenv.counting:Counting", "--port", "{port}"]
THEIRS += ["--log-level", "warning"]


async def ours(url: str, sessions: int, steps: int, action: dict[str, Any]) -> float:
    from forge_envs.openenv import OpenEnvClient

    async with OpenEnvClient(url, sessions=sessions) as client:
        opened = [await client.acquire() for _ in range(sessions)]
        return await timed(opened, steps, action)


async def theirs(url: str, sessions: int, steps: int, action: dict[str, Any]) -> float:
    from openenv import GenericEnvClient

    opened = [GenericEnvClient(base_url=url) for _ in range(sessions)]
    for client in opened:
        await client.connect()
    taken = await timed(opened, steps, action)
    for client in opened:
        await client.close()
    return taken


async def timed(opened: list[Any], steps: int, action: dict[str, Any]) -> float:
    async def play(session: Any, count: int) -> None:
        await session.reset()
        for _ in range(count):
            await session.step(action)

    await asyncio.gather(*(play(session, 20) for session in opened))
    start = time.perf_counter()
    await asyncio.gather(*(play(session, steps // len(opened)) for session in opened))
    return time.perf_counter() - start


def measure(which: str, url: str, sessions: int, steps: int, action: dict[str, Any]) -> dict[str, float]:
    """In this process: steps per second, CPU milliseconds of a thousand steps, CPU seconds of the imports."""
    before = time.process_time()
    if which == "ours":
        import forge_envs.openenv  # noqa: F401
    else:
        import openenv.core  # noqa: F401
    imported = time.process_time() - before
    start = time.process_time()
    taken = asyncio.run((ours if which == "ours" else theirs)(url, sessions, steps, action))
    return {"rate": steps / taken, "cpu": 1e6 * (time.process_time() - start) / steps, "imports": imported}


async def compare(rounds: int, steps: int, own_server: bool) -> None:
    from forge_envs.openenv import LocalServer

    action = {"text": "x"} if own_server else {"step": 5}
    async with await LocalServer.start(OURS if own_server else THEIRS, cwd=ROOT, env={"SESSIONS": "64"}) as server:
        for sessions in (1, 32):
            found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
            for _ in range(rounds):
                for which, figures in found.items():
                    asked = [which, server.url, str(sessions), str(steps), json.dumps(action)]
                    command = [sys.executable, "-P", __file__, "--measure", *asked]
                    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=ROOT)
                    if done.returncode:
                        raise SystemExit(done.stderr)
                    figures.append(json.loads(done.stdout.splitlines()[-1]))
            for which, figures in found.items():
                rate, cpu, imports = (statistics.median(f[k] for f in figures) for k in ("rate", "cpu", "imports"))
                low, high = min(f["rate"] for f in figures), max(f["rate"] for f in figures)
                said = f"{sessions:2} sessions, {which:6}: {rate:5.0f} steps/s ({low:.0f}-{high:.0f})"
                print(f"{said}, {cpu:4.0f} CPU-ms per 1,000 steps, imports {imports:.2f} CPU-s", flush=True)
            pairs = zip(found["ours"], found["theirs"], strict=True)
            ratios = [mine["rate"] / other["rate"] for mine, other in pairs]
            print(f"{sessions:2} sessions: {statistics.median(ratios):.2f} times as many steps (median of {rounds})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6400)
    parser.add_argument("--ours", action="store_true", help="on a server of this library")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        which, url, sessions, steps, action = asked.measure
        print(json.dumps(measure(which, url, int(sessions), int(steps), json.loads(action))))
    else:
        asyncio.run(compare(asked.rounds, asked.steps, asked.ours))


if __name__ == "__main__":
    main()
