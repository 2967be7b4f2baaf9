"""Kubernetes, ssh, SkyPilot and torchrun: what they are given is valid, and runs."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from forge_cluster.kubernetes import make_manifests
from forge_cluster.slurm import make_script
from tests.forge_cluster.kube import VERSION, Cluster
from tests.forge_cluster.machines import ROOT, Machines, environment, inside, wait_until

CONFIG = "tests/forge_cluster/tiny.yaml"
FORGE = [sys.executable, "-m", "forge"]


def test_kubernetes_manifests_match_api_schema():
    validate = pytest.importorskip("kubernetes_validate")
    manifests = make_manifests("x", ["python", "-m", "forge"], "registry.example/forge:1", 2, 8, claim="shared")
    for manifest in manifests:
        validate.validate(manifest, VERSION, strict=True)
    kinds = [manifest["kind"] for manifest in manifests]
    assert kinds == ["Secret", "Service", "StatefulSet", "Job"]
    worker = manifests[2]["spec"]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "8"
    with pytest.raises(validate.ValidationError):
        validate.validate(manifests[1] | {"spec": {"clusterIp": "None"}}, VERSION, strict=True)


@pytest.mark.slow
@pytest.mark.processes
def test_run_launched_on_kubernetes_finishes_after_resume(machines_missing, tmp_path):
    pytest.importorskip("kubernetes_validate")
    if machines_missing:
        pytest.skip(machines_missing)
    with Machines(3, shared=[ROOT, sys.prefix, tmp_path]) as lab:
        cluster = Cluster(lab, tmp_path)
        command = [*FORGE, "launch", "kubernetes", CONFIG, "--image", "registry.example/forge:1", "--nodes", "2"]
        command += ["--mount", str(ROOT), "--python", sys.executable, "--run.root", str(tmp_path)]
        command += ["--training.steps", "60"]
        kubectl = tmp_path / "kubectl"  # keeps what it is given
        kubectl.write_text(f'#!/bin/sh\n[ "$*" = "apply -f -" ] && cat >{tmp_path}/applied && echo accepted\n')
        kubectl.chmod(0o755)
        own = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
        done = lab[0].run(command, str(ROOT), env=own, capture_output=True, text=True, timeout=120)
        assert done.stdout == "accepted\nkubectl logs -f job/tiny\n", done
        for manifest in json.loads((tmp_path / "applied").read_text())["items"]:
            cluster.create(manifest)
        wait_until(lambda: any((tmp_path / "tiny/checkpoints").glob("step_*2*")), 180, "a checkpoint")
        for process in lab[1]._started + lab[2]._started:  # both pods are to be taken away
            if process.poll() is None and (tmp_path / "worker-m2.log").exists():
                subprocess.run(["kill", str(inside(process))], check=False)
        wait_until(lambda: len(cluster.codes) >= 1, 60, "the run saves itself")
        assert cluster.codes[0] == 75, (tmp_path / "controller-m1.log").read_text()[-3000:]
        for node in lab[1:]:
            pod = cluster.objects["StatefulSet", "tiny-workers"]["spec"]["template"]["spec"]
            wait_until(lambda node=node: node.processes("[f]orge worker") == 0, 30, "the old worker ends")
            cluster.start(pod, node)
        wait_until(lambda: cluster.codes[-1] == 0, 240, "the run goes on")
        assert (tmp_path / "tiny" / "finished").exists()


@pytest.mark.processes
@pytest.mark.full
def test_run_launched_over_ssh_finishes(machines_missing, tmp_path):
    if machines_missing:
        pytest.skip(machines_missing)
    if shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("no sshd here (apt-get install openssh-server)")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    options = (
        f"Host m*\n  IdentityFile {key}\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    with Machines(3, shared=[ROOT, sys.prefix, tmp_path]) as lab:
        for machine in lab[1:]:
            setup = (
                f"mkdir -p /run/sshd ~root/.ssh; cp {key}.pub ~root/.ssh/authorized_keys; chmod 700 ~root ~root/.ssh; "
            )
            setup += "chmod 600 ~root/.ssh/authorized_keys; ssh-keygen -A >/dev/null; "
            setup += "exec /usr/sbin/sshd -D -e -o PermitRootLogin=yes -o StrictModes=no"
            machine.start(["sh", "-c", setup], stderr=(tmp_path / f"sshd-{machine.name}").open("w"))
        (tmp_path / "config").write_text(options)
        lab[0].run(["sh", "-c", f"mkdir -p ~root/.ssh; cp {tmp_path}/config ~root/.ssh/config"], check=True)
        wait_until(
            lambda: all(":22 " in m.run(["ss", "-ltn"], capture_output=True, text=True).stdout for m in lab[1:]),
            20,
            "sshd",
        )
        command = [
            *FORGE,
            "launch",
            "ssh",
            CONFIG,
            "--hosts",
            "m2,m3",
            "--run.root",
            str(tmp_path),
            "--training.steps",
            "3",
        ]
        done = lab[0].run(command, str(ROOT), env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert (tmp_path / "tiny" / "finished").exists()
        for machine in lab[1:]:
            wait_until(lambda machine=machine: machine.processes("[f]orge worker") == 0, 15, "the workers end")
        # A launcher that is killed leaves none either.
        started = lab[0].start(
            [*command, "--run.name", "second", "--training.steps", "50"], str(ROOT), env=environment()
        )
        wait_until(lambda: lab[1].processes("[f]orge.runtime.controller.child") > 0, 120, "it runs")
        lab[0].run(["pkill", "-9", "-f", "[l]aunch ssh"])
        started.wait(20)
        for machine in lab[1:]:
            wait_until(lambda machine=machine: machine.processes("[f]orge worker") == 0, 15, "the workers end")


TORCHX = shutil.which("torchx", path=f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', '')}")


def torchx(tmp_path: Path, scheduler: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a tiny configuration on two of a scheduler's nodes."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0" * 64)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(TORCHX), "run", "-s", scheduler, *options, "dist.ddp", "-j", "2x1", "--rdzv_port", str(port)]
    command += ["--env", f"FORGE_SECRET={secret}", "-m", "forge.cluster.torchrun", "--", "train", CONFIG]
    command += ["--run.root", str(tmp_path), "--training.steps", "3"]
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"  # of torchrun
    return subprocess.run(
        command, cwd=ROOT, env=environment() | {"PATH": path}, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.processes
@pytest.mark.full
def test_slurm_dry_run_prints_valid_script():
    command = [
        *FORGE,
        "launch",
        "slurm",
        CONFIG,
        "--dry-run",
        "--nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--time",
        "4:00:00",
    ]
    command += [
        "--partition",
        "gpu",
        "--sbatch",
        "account=lab",
        "--sweep",
        "training.learning_rate=1e-6,3e-6",
        "--seeds",
        "2",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    for line in ("nodes=4", "gpus-per-node=8", "time=4:00:00", "partition=gpu", "account=lab", "array=0-3"):
        assert f"#SBATCH --{line}\n" in done.stdout
    assert done.stdout.count("--run.name tiny-learning_rate") == 4
    assert "uses only 0 of the 32 GPUs that are reserved" in done.stderr
    wrong = subprocess.run(
        [*command, "--training.stepz", "3"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert wrong.returncode == 1
    assert "error:" in wrong.stderr
    assert "stepz" in wrong.stderr


@example("x\ntouch /tmp/p\n#")
@example("a b")
@example("\\'$(id) `id` \"; # --wrap=id")
@example("-n 99")
@example("\x00")
@example("x" * 10_000)
@given(st.text(min_size=1))
def test_slurm_script_quotes_names_and_directories(text: str):
    def options(*job: Any, time: str) -> list[list[str]]:
        lines = [line for line in make_script(*job, time=time).split("\n") if line.startswith("#SBATCH ")]
        return [shlex.split(line.removeprefix("#SBATCH ")) for line in lines]

    hostile = (text, [["forge", "train", text]], Path("/work", text), Path("/runs", text))
    if not text.isprintable():
        with pytest.raises(ValueError, match=r"\A[^\n]*control character\Z"):
            options(*hostile, time=text)
        return
    lines = options(*hostile, time=text)
    given_values = {"job-name": text, "time": text, "output": f"{Path('/runs', text)}/slurm-%j.out"}
    assert len(lines) == len(options("run", [["forge", "train"]], Path("/work"), Path("/runs"), time="1:00"))
    for words in lines:
        assert len(words) == 1
        name, _, value = words[0].removeprefix("--").partition("=")
        assert value == given_values.get(name, value)
