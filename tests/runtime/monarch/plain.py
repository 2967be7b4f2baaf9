"""A program of plain Monarch that imports nothing of forge: actors that call one another, slices, ports, supervision, a
job's hosts. `alongside.py` runs it in a controller's process."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from monarch.actor import Actor, ActorError, MeshFailure, Port, context, current_rank, endpoint, this_host, this_proc
from monarch.job import LocalJob


class Player(Actor):
    """Throws a ball to the player of the same rank on another mesh."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.caught: list[str] = []

    @endpoint
    def throw(self, other: Player, ball: str) -> str:
        return other.slice(**current_rank()).catch.call_one(f"{ball} of {self.name}").get(timeout=30)

    @endpoint
    def catch(self, ball: str) -> str:
        self.caught.append(ball)
        return f"{self.name} {context().actor_instance.rank.rank} caught {ball}"

    @endpoint
    def count(self) -> int:
        return len(self.caught)

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[int]) -> None:
        threading.Timer(0.05, lambda: port.send(len(self.caught))).start()

    @endpoint
    def fail(self) -> None:
        raise ZeroDivisionError("on purpose")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Watcher(Actor):
    """Owns a process, and handles its loss."""

    def __init__(self) -> None:
        self.lost = threading.Event()

    @endpoint
    async def own(self) -> int:
        self.procs = context().actor_instance.proc.host_mesh.spawn_procs({"gpus": 1})
        self.child = self.procs.spawn("child", Player, "child")
        return await self.child.pid.call_one()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.lost.set()
        return True

    @endpoint
    async def saw_the_loss(self) -> bool:
        return self.lost.is_set()


def play() -> None:
    """Ping-pong between two meshes, then calls of slices and errors of single ranks."""
    left_procs = this_host().spawn_procs({"rows": 2, "gpus": 2})
    right_procs = LocalJob(["hosts"]).state(cached_path=None).hosts.spawn_procs({"rows": 2, "gpus": 2})
    left = left_procs.spawn("left", Player, "left")
    right = right_procs.spawn("right", Player, "right")
    caught = [answer for _, answer in left.throw.call(right, "ball").get(timeout=60).items()]
    assert caught == [f"right {rank} caught ball of left" for rank in range(4)]
    right.slice(rows=1, gpus=slice(0, 1)).catch.call("second").get(timeout=30)
    assert [count for _, count in right.count.call().get(timeout=30).items()] == [1, 1, 2, 1]
    assert right.slice(rows=1, gpus=0).later.call_one().get(timeout=30) == 2
    with pytest.raises(ActorError, match="on purpose"):
        left.slice(rows=0, gpus=0).fail.call_one().get(timeout=30)
    assert left.slice(rows=0, gpus=0).count.call_one().get(timeout=30) == 0
    left_procs.stop().get(timeout=30)
    right_procs.stop().get(timeout=30)


def lose() -> None:
    """Kill a process that an actor owns: the actor sees it, and lives."""
    procs = this_host().spawn_procs({"gpus": 1})
    watcher = procs.spawn("watcher", Watcher)
    os.kill(watcher.own.call_one().get(timeout=60), signal.SIGKILL)
    pause = threading.Event()
    seen = any(watcher.saw_the_loss.call_one().get(timeout=30) or pause.wait(0.2) for _ in range(450))
    assert seen
    procs.stop().get(timeout=60)


def main() -> None:
    solo = this_proc().spawn("solo", Player, "solo")
    assert solo.catch.call_one("ball").get(timeout=30) == "solo 0 caught ball"
    play()
    lose()
    print("PLAYED", flush=True)


if __name__ == "__main__":
    main()
