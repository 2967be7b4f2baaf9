"""Hosts that lose their power, their cable or their controller: every call is answered, and nothing old lives on."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forge_cluster.machines import (
    ROOT,
    Controller,
    environment,
    trained,
    wait_until,
)

pytestmark = [pytest.mark.processes, pytest.mark.full]
OURS = "[b]ootstrap_main|[f]orge.runtime.controller.child"


def test_replicas_move_off_lost_host_which_is_reused_on_return(lab):
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


def test_disconnected_host_ends_component_processes_and_rejoins(lab):
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


def test_killed_host_daemon_or_worker_ends_component_processes(lab):
    controller = Controller(lab[0], "replicas", "2", "2", hosts="m2,m3")
    controller.read("ready")
    lab[1].run(["pkill", "-9", "-f", "[f]orge_cluster.worker"])
    wait_until(lambda: controller.ask("states") == ["up", "up"], 30, "another worker is started")
    assert [host for _, host, _ in controller.ask("where")] == ["m2", "m3"]
    lab[1].run(["pkill", "-9", "-f", "[f]orge worker"])
    wait_until(lambda: lab[1].processes(OURS) == 0, 10, "its processes end")
    wait_until(lambda: [host for _, host, _ in controller.ask("where")] == ["m3", "m3"], 40, "they are replaced")
    controller.end()


@pytest.mark.slow
@pytest.mark.parametrize("lab", [4], indirect=True)
def test_lost_hosts_do_not_change_trained_weights(lab, tmp_path):
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
