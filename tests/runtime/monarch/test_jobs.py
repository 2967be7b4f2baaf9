"""Services on jobs of Monarch's: a real Slurm, and a stand-in of Kubernetes, over machines out of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.cluster import kube, slurm
from tests.runtime.cluster.machines import ROOT, Machine, Machines, environment, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(500)]
# Monarch 0.7 reads the JSON of Slurm 24.11 and later (monarch#2330); Debian's 22.05 prints another.
SQUEUE = """
import json, subprocess, sys
listed = json.loads(subprocess.check_output(["/usr/bin/squeue", *sys.argv[1:]], text=True))
for job in listed["jobs"]:
    hosts = subprocess.check_output(["scontrol", "show", "hostnames", job["nodes"]], text=True) if job["nodes"] else ""
    job["job_resources"] = {"nodes": {"allocation": [{"name": name} for name in hosts.split()]}}
    job["job_state"] = [job["job_state"]]
print(json.dumps(listed))
"""


@pytest.fixture(scope="module")
def machines_missing() -> str | None:
    from tests.runtime.cluster.machines import missing

    return missing()


class Program:
    """`job_program` on a machine."""

    def __init__(self, machine: Machine, kind: str, folder: Path, variables: dict[str, str]) -> None:
        self.errors = folder / "program.err"
        command = [sys.executable, "-m", "tests.runtime.monarch.job_program", kind, str(folder)]
        with self.errors.open("w") as file:
            self.process = machine.start(
                command, str(ROOT), env=variables, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()[-3000:]
        report: dict[str, Any] = json.loads(line)
        return report

    def check_services(self, hosts: list[str]) -> None:
        """Check the first report: a component on each host of its mesh."""
        report = self.read()
        assert sorted([*report["adders"], *report["judge"]]) == hosts, report
        assert len(report["adders"]) == 2
        assert report["sums"] == [15, 15]
        assert report["total"] == [3_000_000.0]
        assert report["here"] == "m1"
        self.adder = report["adders"][0]
        self.other = report["adders"][1]

    def check_loss(self, folder: Path) -> None:
        """Check what is left once a host is lost, and the end."""
        (folder / "lost").touch()
        assert self.read() == {"after": [self.other]}
        assert self.process.wait(60) == 0, self.errors.read_text()[-3000:]


@pytest.mark.skipif(bool(slurm.missing()), reason=str(slurm.missing()))
def test_services_on_a_job_of_slurm(machines_missing: str | None, tmp_path: Path):
    if machines_missing:
        pytest.skip(machines_missing)
    with slurm.Slurm(4, shared=[ROOT, sys.prefix, tmp_path]) as cluster:
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "squeue").write_text(f"#!{sys.executable}\n{SQUEUE}")
        (programs / "squeue").chmod(0o755)
        variables = environment() | cluster.environment
        variables |= {name: environment()[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
        variables["PATH"] = f"{programs}:{cluster.environment['PATH']}"
        program = Program(cluster[0], "slurm", tmp_path, variables)
        program.check_services(["m2", "m3", "m4"])
        next(machine for machine in cluster if machine.name == program.adder).kill()
        program.check_loss(tmp_path)
        cluster.wait(lambda: not cluster.say("squeue", "--noheader"), 60, "an empty queue")


def test_services_on_a_job_of_kubernetes(machines_missing: str | None, tmp_path: Path):
    pytest.importorskip("kubernetes")
    pytest.importorskip("kubernetes_validate")
    if machines_missing:
        pytest.skip(machines_missing)
    with Machines(4, shared=[ROOT, sys.prefix, tmp_path]) as lab:
        image = environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
        cluster = kube.Cluster(lab, tmp_path, image)
        program = Program(lab[0], "kubernetes", tmp_path, cluster.account(lab[0], environment()))
        program.check_services(["m2", "m3", "m4"])
        next(machine for machine in lab if machine.name == program.adder).kill()
        program.check_loss(tmp_path)
        assert not [kind for kind, _ in cluster.objects if kind == "MonarchMesh"]
        for machine in lab[1:]:
            if machine.name != program.adder:
                wait_until(lambda machine=machine: machine.processes("[r]un_worker_loop") == 0, 30, "pods end")
