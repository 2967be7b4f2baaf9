"""What a service costs on top of Monarch: latency of one call, calls per second, memory of a long queue, many replicas.

    OMP_NUM_THREADS=1 python benchmarks/service.py

Latencies of raw calls and of each verb are taken in turns within one run, so that the machine is the same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from forge.runtime.controller import ForgeActor, endpoint, run
from forge.runtime.controller._monarch import Actor, concurrent_endpoint, this_host

Call = Callable[[], Awaitable[Any]]


class Echo(ForgeActor):
    @endpoint
    async def echo(self, value: int) -> int:
        return value

    @endpoint
    async def pause(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()


class RawEcho(Actor):
    @concurrent_endpoint
    async def echo(self, value: int) -> int:
        return value


async def milliseconds(call: Call, times: int) -> list[float]:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        await call()
        taken.append(1e3 * (time.perf_counter() - start))
    return taken


async def per_second(call: Call, calls: int, at_once: int = 64) -> float:
    start = time.perf_counter()
    left = iter(range(calls))

    async def worker() -> None:
        for _ in left:
            await call()

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return calls / (time.perf_counter() - start)


def megabytes(pid: int) -> float:
    """Resident memory of a process."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def calls(rounds: int, times: int, length: int) -> None:
    raw = this_host().spawn_procs({"procs": 1}, name="raw").spawn("raw", RawEcho)
    mesh = this_host().spawn_procs({"procs": 8}, name="mesh").spawn("mesh", RawEcho)
    apart = [this_host().spawn_procs({"procs": 1}, name=f"raw{n}").spawn("raw", RawEcho) for n in range(8)]
    services = {n: await Echo.options(num_replicas=n, mesh_name=f"echo{n}").as_service() for n in (1, 2, 4, 8)}
    one = services[1]
    sides: dict[str, Call] = {
        "raw Monarch call_one": lambda: raw.echo.call_one(1).as_asyncio(),
        "route": lambda: one.echo.route(1),
        "route in a session": lambda: services[2].echo.options(session="mine").route(1),
        **{f"fanout to {n}": (lambda n=n: services[n].echo.fanout(1)) for n in (2, 4, 8)},
        "raw Monarch call_one to each of 8": lambda: asyncio.gather(
            *(one.echo.call_one(1).as_asyncio() for one in apart)
        ),
        "raw Monarch broadcast to a mesh of 8": lambda: mesh.echo.call(1).as_asyncio(),
    }
    latencies: dict[str, list[float]] = {name: [] for name in sides}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        await milliseconds(call, 50)
    for _ in range(rounds):
        for name, call in sides.items():
            latencies[name] += await milliseconds(call, times)
        for name, call in sides.items():
            rates[name].append(await per_second(call, times))
    base, route = (statistics.median(latencies[name]) for name in ("raw Monarch call_one", "route"))
    print("| call | p50, ms | p99, ms | over raw, ms | in routes | calls/s, 64 at once |\n" + "|---" * 6 + "|")
    for name, taken in latencies.items():
        taken.sort()
        middle, late = statistics.median(taken), taken[int(0.99 * len(taken))]
        shown = f"{middle:.2f} | {late:.2f} | {middle - base:+.2f} | {middle / route:.1f}"
        print(f"| {name} | {shown} | {statistics.median(rates[name]):.0f} |")
    await queue({"Monarch only": sides["raw Monarch call_one"], "the service": sides["route"]}, length)
    for service in services.values():
        await service.stop()


async def queue(sides: dict[str, Call], length: int) -> None:
    """Many calls at once to one process, again and again: what stays of them in the controller's memory."""
    print()
    for name, call in sides.items():
        sizes = []
        for _ in range(6):
            await asyncio.gather(*(call() for _ in range(length)))
            gc.collect()
            sizes.append(megabytes(os.getpid()))
        shown = ", ".join(f"{size:.0f}" for size in sizes)
        print(f"{length:,} queued calls of {name}, controller after each time: {shown} MB")


async def many(replicas: int, per_process: int) -> None:
    start = time.perf_counter()
    service = await Echo.options(num_replicas=replicas, per_process=per_process, mesh_name="light").as_service()
    started = time.perf_counter() - start
    calls = 100 * replicas
    start = time.perf_counter()
    await asyncio.gather(*(service.pause.route(0.01) for _ in range(calls)))
    served = [replica.served for replica in service.status().replicas]
    rate = calls / (time.perf_counter() - start)
    routes = await milliseconds(lambda: service.echo.route(1), 300)
    cpu = time.process_time()
    fanouts = await milliseconds(lambda: service.echo.fanout(1), 50)
    cpu = 1e3 * (time.process_time() - cpu) / 50
    start = time.perf_counter()
    await service.stop()
    stopped = time.perf_counter() - start
    route, fanout = statistics.median(routes), statistics.median(fanouts)
    print(
        f"| {replicas} | {replicas // per_process} | {started:.1f} | {rate:.0f} | {min(served)} to {max(served)} | "
        f"{route:.2f} | {fanout:.1f} | {fanout / route:.1f} | {cpu:.1f} | {stopped:.1f} |",
        flush=True,
    )


async def main(args: argparse.Namespace) -> None:
    await calls(args.rounds, args.times, args.queue)
    print(
        "\n| replicas | processes | start, s | calls/s | calls of each | route, ms | fanout, ms | in routes | "
        "controller's CPU, ms | stop, s |\n" + "|---" * 10 + "|"
    )
    for replicas in args.replicas:
        await many(replicas, args.per_process)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=400, help="calls of each kind in a round")
    parser.add_argument("--queue", type=int, default=10_000, help="calls of a long queue")
    parser.add_argument("--replicas", type=int, nargs="*", default=[64, 512], help="light replicas of one service")
    parser.add_argument("--per-process", type=int, default=64)
    # Components are sent by the name of their module: this one must have one that their processes can import.
    sys.path.insert(0, str(Path(__file__).parent))
    run(main(parser.parse_args()))
