"""Hosts that lose their power, their cable or their controller: every call is answered, and nothing old lives on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster.machines import ROOT, Machine, Machines, environment, inside, missing, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=str(missing()))]
OURS = "[b]ootstrap_main|[f]orge.controller.child"


class Controller:
    """A program of `tests.cluster.controllers` on a machine."""

    def __init__(self, machine: Machine, *words: str, hosts: str, **more: str) -> None:
        own = environment(FORGE_HOSTS=hosts, **more)
        command = [sys.executable, "-m", "tests.cluster.controllers", *words]
        self.process = machine.start(
            command, str(ROOT), env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self, event: str) -> dict:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and (found := json.loads(line))["event"] == event:
                return found
        raise AssertionError(f"the controller ended without {event!r}")

    def send(self, what: str, **values: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **values}) + "\n")
        self.process.stdin.flush()

    def ask(self, what: str, **values: object):
        self.send(what, **values)
        answer = self.read("answer")
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def end(self) -> None:
        self.send("end")
        assert self.process.wait(30) == 0


@pytest.fixture
def lab() -> Iterator[Machines]:
    with Machines(3, shared=[ROOT, sys.prefix]) as machines:
        for machine in machines[1:]:
            machine.work()
        wait_until(lambda: all(listens(machine) for machine in machines[1:]), 60, "workers listen")
        yield machines


def listens(machine: Machine) -> bool:
    return ":7070" in machine.run(["ss", "-ltn"], capture_output=True, text=True).stdout


def test_a_machine_that_is_lost_is_replaced_and_taken_up_again(lab):
    controller = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    controller.read("ready")
    assert [host for _, host, _ in controller.ask("where")] == ["m2", "m3"]
    controller.send("pause", seconds=6.0, calls=4)
    time.sleep(1.0)
    lab[1].kill()
    assert controller.read("answer")["value"].count("m3") >= 2
    wait_until(lambda: controller.ask("hosts") == ["m3"], 15, "the loss is seen")
    wait_until(lambda: controller.ask("states") == ["up", "up"], 30, "it is replaced")
    assert [host for _, host, _ in controller.ask("where")] == ["m3", "m3"]
    lab[1].boot()
    lab[1].work()
    wait_until(lambda: sorted(controller.ask("hosts")) == ["m2", "m3"], 30, "it is taken up again")
    controller.end()


def test_a_cable_that_is_out_for_two_seconds_costs_nothing(lab):
    controller = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    controller.read("ready")
    before = controller.ask("where")
    controller.send("pause", seconds=3.0, calls=4)
    time.sleep(0.5)
    lab[1].cut()
    time.sleep(2.0)
    lab[1].heal()
    assert len(controller.read("answer")["value"]) == 4
    assert controller.ask("where") == before
    controller.end()


def test_a_machine_that_was_cut_off_ends_its_processes_and_comes_back(lab):
    controller = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    controller.read("ready")
    before = controller.ask("where")
    assert lab[1].processes(OURS) == 1
    lab[1].cut()
    controller.send("pause", seconds=1.0, calls=4)
    took = wait_until(lambda: lab[1].processes(OURS) == 0, 10, "its processes end by themselves")
    print(f"processes ended after {took:.1f} s")
    assert controller.read("answer")["value"].count("m3") >= 2
    wait_until(lambda: controller.ask("states") == ["up", "up"], 30, "it is replaced")
    lab[1].heal()
    wait_until(lambda: sorted(controller.ask("hosts")) == ["m2", "m3"], 30, "it is taken up again")
    after = controller.ask("where")
    assert after[1] == before[1]
    assert after[0] != before[0]
    controller.end()


def test_a_lost_controller_leaves_no_process(lab):
    controller = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    controller.read("ready")
    os.kill(inside(controller.process), signal.SIGKILL)
    took = wait_until(lambda: lab[1].processes(OURS) + lab[2].processes(OURS) == 0, 10, "its processes end")
    print(f"processes ended after {took:.1f} s")
    again = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    again.read("ready")
    assert [host for _, host, _ in again.ask("where")] == ["m2", "m3"]
    again.end()


def test_a_daemon_or_a_worker_that_is_killed_takes_its_processes_along(lab):
    controller = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    controller.read("ready")
    lab[1].run(["pkill", "-9", "-f", "[f]orge.cluster.worker"])
    wait_until(lambda: controller.ask("states") == ["up", "up"], 30, "another worker is started")
    assert [host for _, host, _ in controller.ask("where")] == ["m2", "m3"]
    lab[1].run(["pkill", "-9", "-f", "[f]orge worker"])
    wait_until(lambda: lab[1].processes(OURS) == 0, 10, "its processes end")
    wait_until(lambda: [host for _, host, _ in controller.ask("where")] == ["m3", "m3"], 40, "they are replaced")
    controller.end()


def test_the_last_host_is_waited_for(lab):
    controller = Controller(lab[0], "replicas", "1", "1", hosts="m2", WAIT="60")
    controller.read("ready")
    lab[1].kill()
    controller.send("pause", seconds=0.1, calls=2)
    time.sleep(8.0)
    lab[1].boot()
    lab[1].work()
    assert controller.read("answer")["value"] == ["m2", "m2"]
    controller.end()


def test_a_host_that_does_not_come_back_ends_the_run(lab):
    controller = Controller(lab[0], "replicas", "1", "1", hosts="m2", WAIT="2")
    controller.read("ready")
    lab[1].kill()
    controller.send("pause", seconds=0.1, calls=1)
    assert controller.process.wait(60) != 0
