"""Hosts that lose their power, their cable or their controller: every call is answered, and nothing old lives on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge.runtime.controller import Options
from forge.runtime.controller.supervisor import SOUND_AFTER
from tests.forge_cluster.machines import (
    NO_CPU_LIMITS,
    ROOT,
    Controller,
    environment,
    inside,
    listens,
    number_here,
    share_of_a_core,
    trained,
    wait_until,
)

pytestmark = [pytest.mark.processes, pytest.mark.full]
PIDS = ["pgrep", "-f", "."]
OURS = "[b]ootstrap_main|[f]orge.runtime.controller.child"


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
    lab[1].run(["pkill", "-9", "-f", "[f]orge.@@CL@@.worker"])
    wait_until(lambda: controller.ask("states") == ["up", "up"], 30, "another worker is started")
    assert [host for _, host, _ in controller.ask("where")] == ["m2", "m3"]
    lab[1].run(["pkill", "-9", "-f", "[f]orge worker"])
    wait_until(lambda: lab[1].processes(OURS) == 0, 10, "its processes end")
    wait_until(lambda: [host for _, host, _ in controller.ask("where")] == ["m3", "m3"], 40, "they are replaced")
    controller.end()


def test_a_replacement_that_is_sent_to_a_dead_worker_costs_seconds(lab):
    """The end of a process is known at once, that of its worker a beat later. A replica that served for a while is
    replaced without back-off, and so in between."""
    controller = Controller(lab[0], "replicas", "1", "1", hosts="m2")
    controller.read("ready")
    time.sleep(SOUND_AFTER + 1.0)
    lab[1].run(["pkill", "-9", "-f", "[f]orge.@@CL@@.worker"])
    wait_until(lambda: controller.ask("states") != ["up"], 10, "the loss is noticed")
    wait_until(lambda: controller.ask("states") == ["up"], 40, "another worker has its replacement")
    controller.end()


@pytest.mark.skipif(NO_CPU_LIMITS, reason="no cgroup of v1")
def test_a_process_elsewhere_that_gets_no_core_is_slow_and_a_stopped_one_is_lost(lab):
    controller = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    controller.read("ready")
    before = controller.ask("where")
    victim = number_here(lab[1], before[0][2])
    # With a hundredth of a core its calls take half a minute, and pings wait behind them.
    with share_of_a_core(victim, percent=1.0):
        controller.send("pause", seconds=0.1, calls=600)
        time.sleep(4 * Options().ping_timeout)
        assert before[0][2] in [int(line) for line in lab[1].run(PIDS, capture_output=True, text=True).stdout.split()]
    assert len(controller.read("answer")["value"]) == 600
    assert controller.ask("where") == before
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: controller.ask("where") != before, 60, "it is replaced")
    assert controller.ask("where")[1] == before[1]
    controller.end()


def test_what_a_scheduler_sends_to_every_process_of_a_host_ends_none_of_the_run(lab):
    """Slurm sends SIGTERM to all processes of a job step, and expects them to use the time until SIGKILL."""
    lab[1].run(["pkill", "-f", "[f]orge worker"])
    wait_until(lambda: not listens(lab[1]), 10, "the worker ends")
    lab[1].work("--grace", "600")
    wait_until(lambda: listens(lab[1]), 60, "a worker with a grace period")
    controller = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    controller.read("ready")
    before = controller.ask("where")
    controller.send("pause", seconds=2.0, calls=4)
    time.sleep(0.5)
    assert lab[1].processes("[p]ython") >= 3  # the daemon, its worker, a replica
    lab[1].run(["pkill", "-TERM", "-f", "python|forge"])
    assert controller.read("answer")["value"].count("m2") == 2
    assert controller.ask("where") == before
    controller.end()


@pytest.mark.parametrize("comes_back", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_last_host_is_waited_for_as_long_as_configured(lab, comes_back):
    controller = Controller(lab[0], "replicas", "1", "1", hosts="m2", WAIT="60" if comes_back else "2")
    controller.read("ready")
    lab[1].kill()
    controller.send("pause", seconds=0.1, calls=2)
    if not comes_back:
        assert controller.process.wait(60) != 0
        return
    time.sleep(8.0)
    lab[1].boot()
    lab[1].work()
    assert controller.read("answer")["value"] == ["m2", "m2"]
    controller.end()


@pytest.mark.slow
@pytest.mark.parametrize("lab", [4], indirect=True)
def test_a_training_run_survives_the_loss_of_any_host(lab, tmp_path):
    """In lock-step, every group trained once means the same weights, whatever was lost meanwhile."""
    config = [sys.executable, "-m", "forge", "train", "tests/forge_cluster/tiny.yaml", "--training.steps", "40"]
    calm = [*config, "--run.root", str(tmp_path / "calm")]
    subprocess.run(calm, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=300)
    own = environment(FORGE_HOSTS="m2,m3,m4")
    process = lab[0].start(
        [*config, "--run.root", str(tmp_path)], str(ROOT), env=own, stderr=subprocess.PIPE, text=True
    )
    checkpoints = tmp_path / "tiny" / "checkpoints"
    for machine in lab[1:]:
        before = latest(checkpoints)
        wait_until(lambda before=before: latest(checkpoints) > before, 120, "a checkpoint")
        machine.kill()
        time.sleep(2.0)
        machine.boot()
        machine.work()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-4000:]
    assert said.count("serves again") >= 2
    assert trained(tmp_path / "tiny") == trained(tmp_path / "calm" / "tiny")


def latest(checkpoints: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*[0-9]")), default=0)
