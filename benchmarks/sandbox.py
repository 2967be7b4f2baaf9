"""How fast the sandbox runs programs, at each level, and whether anything is left of them.

    python benchmarks/sandbox.py                     # the table; as root also that of an ordinary user
    python benchmarks/sandbox.py --soak 10000        # so many programs and cells, of which nothing may be left

Each program is `print(sum(range(100)))`; a plain subprocess is a new interpreter (-I -S) without any limit. Latency one
at a time, programs a second one and two at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from forge_sandbox import Sandbox, SandboxError
from forge_sandbox.inside import limits

PROGRAM = "print(sum(range(100)))"
LEVELS = ("namespaces", "landlock", "bubblewrap", "none")
ORDINARY = 12345

Run = Callable[[], Awaitable[object]]


async def speed(run: Run, rounds: int) -> tuple[float, float, float, float]:
    """Median and 95th percentile of milliseconds; programs a second, one and two at once."""
    await asyncio.gather(run(), run())
    spent = []
    start = time.perf_counter()
    for _ in range(rounds):
        before = time.perf_counter()
        await run()
        spent.append(1000 * (time.perf_counter() - before))
    one = rounds / (time.perf_counter() - start)

    async def several() -> None:
        for _ in range(rounds // 2):
            await run()

    start = time.perf_counter()
    await asyncio.gather(several(), several())
    two = 2 * (rounds // 2) / (time.perf_counter() - start)
    return statistics.median(spent), statistics.quantiles(spent, n=20)[-1], one, two


async def table(rounds: int, python: str) -> None:
    print("| runner | user | p50 ms | p95 ms | per s | per s, 2 at once |\n|---|---|---|---|---|---|")
    users = [("root", None), ("ordinary", ORDINARY)] if os.geteuid() == 0 else [("ordinary", None)]
    for who, user in users:

        def row(runner: str, found: tuple[float, ...], who: str = who) -> None:
            p50, p95, one, two = found
            print(f"| {runner} | {who} | {p50:.1f} | {p95:.1f} | {one:.0f} | {two:.0f} |", flush=True)

        def plain(user: int | None = user) -> str:
            words = [python, "-I", "-S", "-c", PROGRAM]
            return subprocess.run(words, env={}, capture_output=True, text=True, user=user, check=True).stdout

        row("plain subprocess", await speed(lambda plain=plain: asyncio.to_thread(plain), rounds))  # type: ignore[misc]
        for level in LEVELS:
            try:
                async with Sandbox(level, python=python, user=user, allow_unsafe=True) as sandbox:
                    row(level, await speed(lambda sandbox=sandbox: sandbox.run(PROGRAM), rounds))  # type: ignore[misc]
            except SandboxError as error:
                print(f"| {level} | {who} | {error} | | | |")


def open_things() -> dict[str, int]:
    """What the machine and this process have of what could leak."""
    return {
        "processes": sum(name.isdecimal() for name in os.listdir("/proc")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mounts": Path("/proc/self/mountinfo").read_text().count("\n"),
        "files in /tmp and /dev/shm": len(os.listdir("/tmp")) + len(os.listdir("/dev/shm")),
        "MB": sum(map(resident, [os.getpid(), *limits.descendants(os.getpid())])) >> 20,
    }


def resident(pid: int) -> int:
    """Bytes of a process, shared pages included."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has exited
        return 0


async def soak(count: int, python: str) -> None:
    """Programs that end in every way, at levels namespaces and landlock. SystemExit: something is left."""
    kinds = [
        PROGRAM,
        "1 / 0",
        "import os; os._exit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    os.close(0); os.close(1); os.close(2)\n    os.fork()\n"
        "    __import__('time').sleep(60)",
        "open('/tmp/left', 'w').write('x' * 1000)",
        "print('x' * 10 ** 6)",
        "import socket; held = [socket.socketpair() for _ in range(20)]",
        "import threading, time\nfor _ in range(5):\n"
        "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    ]
    for level in ("namespaces", "landlock"):
        async with Sandbox(level, python=python) as sandbox:
            await asyncio.gather(*(sandbox.run(PROGRAM) for _ in range(4)))
            before, start, seen = open_things(), time.perf_counter(), {}
            for number in range(0, count, 100):
                numbers = range(number, min(number + 100, count))
                results = [sandbox.run(kinds[each % len(kinds)]) for each in numbers]
                for result in await asyncio.gather(*results):
                    seen[result.status] = seen.get(result.status, 0) + 1
            seconds = time.perf_counter() - start
            check(f"{level}: {count} programs in {seconds:.0f} s, {seen}", before)
            await sessions(sandbox, kinds, count)


async def sessions(sandbox: Sandbox, kinds: list[str], count: int) -> None:
    """A tenth as many cells in sessions of up to 50, which many cells end; then all in one session."""
    before, start, seen, opened, cells = open_things(), time.perf_counter(), dict[str, int](), 0, 0
    while 10 * cells < count:
        opened += 1
        async with sandbox.session() as python:
            for cell in (kinds * 50)[opened % len(kinds) :][:50]:
                result = await python.run(cell)
                seen[result.status] = seen.get(result.status, 0) + 1
                cells += 1
                if result.status not in ("ok", "error"):
                    break
    seconds = time.perf_counter() - start
    check(f"{sandbox.level}: {cells} cells in {opened} sessions, {seconds:.0f} s, {seen}", before)
    async with sandbox.session() as python:
        for _ in range(100):
            await python.run("x = 1")
        before, start = open_things(), time.perf_counter()
        for _ in range(count):
            await python.run("x += 1")
        seconds = time.perf_counter() - start
        check(
            f"{sandbox.level}: {(await python.run('x')).stdout.strip()} cells in one session, {seconds:.0f} s", before
        )


def check(what: str, before: dict[str, int]) -> None:
    """SystemExit: something is left. Other programs of the machine may start processes and write files meanwhile."""
    after = open_things()
    print(f"{what}; before {before}; after {after}", flush=True)
    leaked = after["mounts"] != before["mounts"] or after["descriptors"] > before["descriptors"]
    if leaked or after["MB"] > before["MB"] + 30:
        sys.exit("something has leaked")


def main() -> None:
    limits.open_proc()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--soak", type=int, default=0)
    parser.add_argument("--python", default="/usr/bin/python3", help="an interpreter that every user can start")
    arguments = parser.parse_args()
    asyncio.run(soak(arguments.soak, arguments.python) if arguments.soak else table(arguments.rounds, arguments.python))


if __name__ == "__main__":
    main()
