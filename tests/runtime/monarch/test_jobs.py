"""Services on jobs of Monarch's: a real Slurm, and a stand-in of Kubernetes, over machines out of namespaces."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forge_cluster import kube, slurm
from tests.forge_cluster.machines import (
    ROOT,
    Machine,
    Machines,
    environment,
    wait_until,
)

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
    from tests.forge_cluster.machines import missing

    return missing()


PROGRAM = [sys.executable, "-m", "tests.runtime.monarch.job_program"]


class Program:
    """`job_program` on a machine."""

    def __init__(self, machine: Machine, kind: str, folder: Path, variables: dict[str, str]) -> None:
        self.errors = folder / "program.err"
        with self.errors.open("w") as file:
            command = [*PROGRAM, kind, str(folder)]
            self.process = machine.start(
                command, str(ROOT), env=variables, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()[-3000:]
        report: dict[str, Any] = json.loads(line)
        return report

    def check_services(self) -> None:
        report = self.read()
        check_report(report, "m1")
        self.adder, self.other = report["adders"]
        self.adder_pid = report["pids"][0]

    def lose(self, machines: Machines, loss: str) -> None:
        """End or stop the process of the first adder, or end its host."""
        host = self.host(machines)
        if loss == "host":
            host.kill()
        else:
            host.run(["kill", "-STOP" if loss == "stopped" else "-KILL", str(self.adder_pid)], check=True)

    def host(self, machines: Machines) -> Machine:
        (host,) = [machine for machine in machines if machine.name == self.adder]
        return host

    def answers_after(self, folder: Path, losses: int = 1) -> list[str]:
        """Hosts that answer once a host or a process is lost; checks that all calls are answered, and the end."""
        (folder / "lost").touch()
        report = self.read()
        assert (report["answers"], report["losses"]) == (20, losses)
        assert self.process.wait(120) == 0, self.errors.read_text()[-3000:]
        hosts: list[str] = report["hosts"]
        return hosts


def check_report(report: dict[str, Any], host: str) -> None:
    """Check that a component is on each host of its mesh and answers there, to a program on this host."""
    assert sorted([*report["adders"], *report["judge"]]) == ["m2", "m3", "m4"], report
    assert len(report["adders"]) == 2
    assert (report["sums"], report["total"], report["here"]) == ([15, 15], [3_000_000.0], host)


@pytest.fixture
def cluster(machines_missing: str | None, tmp_path: Path) -> Iterator[slurm.Slurm]:
    if machines_missing:
        pytest.skip(machines_missing)
    if slurm.missing():
        pytest.skip(str(slurm.missing()))
    with slurm.Slurm(4, shared=[ROOT, sys.prefix, tmp_path]) as machines:
        yield machines


def user_environment(cluster: slurm.Slurm, folder: Path) -> dict[str, str]:
    """The environment of a user of the cluster, with a squeue that Monarch can read."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "squeue").write_text(f"#!{sys.executable}\n{SQUEUE}")
    (programs / "squeue").chmod(0o755)
    variables = environment() | cluster.environment
    variables |= {name: environment()[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    return variables | {"PATH": f"{programs}:{cluster.environment['PATH']}"}


def test_services_on_monarch_slurm_batch_job_run(cluster: slurm.Slurm, tmp_path: Path):
    variables = user_environment(cluster, tmp_path)
    (tmp_path / "lost").touch()  # nothing is lost here
    submitted = cluster[0].run([*PROGRAM, "submit", str(tmp_path)], str(tmp_path), env=variables, capture_output=True)
    assert submitted.returncode == 0, submitted.stderr.decode()[-3000:]
    cluster.wait(lambda: not cluster.say("squeue", "--noheader"), 120, "end of the job")
    (output,) = tmp_path.glob("slurm_*.out")
    (errors,) = tmp_path.glob("slurm_*.err")
    lines = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    assert len(lines) == 2, errors.read_text()[-3000:]
    check_report(lines[0], "m2")  # the first node
    assert lines[1] == {"answers": 20, "hosts": sorted(lines[0]["adders"]), "losses": 0}
    for machine in cluster[1:]:
        assert machine.processes("[r]un_worker_loop") == 0


def test_services_on_monarch_slurm_job_survive_lost_process(cluster: slurm.Slurm, tmp_path: Path):
    program = Program(cluster[0], "slurm", tmp_path, user_environment(cluster, tmp_path))
    program.check_services()
    # A process: with a node Slurm would end the whole job.
    program.lose(cluster, "process")
    assert program.other in program.answers_after(tmp_path)
    cluster.wait(lambda: not cluster.say("squeue", "--noheader"), 60, "an empty queue")


@pytest.fixture
def pods(machines_missing: str | None, tmp_path: Path) -> Iterator[kube.Cluster]:
    """Four machines, three of them for pods."""
    pytest.importorskip("kubernetes")
    pytest.importorskip("kubernetes_validate")
    if machines_missing:
        pytest.skip(machines_missing)
    with Machines(4, shared=[ROOT, sys.prefix, tmp_path]) as lab:
        yield kube.Cluster(lab, tmp_path, environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin"))


# The loss of a host that only Monarch watches is known after a minute. A process that is stopped is known by what its
# host's observer says: silence only would be waited for without end.
@pytest.mark.parametrize("loss", ["process", "stopped", pytest.param("host", marks=pytest.mark.slow)])
def test_services_on_monarch_kubernetes_job_survive_lost_pods(loss: str, pods: kube.Cluster, tmp_path: Path):
    variables = environment(UNSEEN="inf") if loss == "stopped" else environment()
    program = Program(pods.lab[0], "kubernetes", tmp_path, pods.account(pods.lab[0], variables))
    program.check_services()
    program.lose(pods.lab, loss)
    hosts = program.answers_after(tmp_path)
    assert hosts == [program.other] if loss == "host" else program.other in hosts
    assert not [kind for kind, _ in pods.objects if kind == "MonarchMesh"]
    for machine in pods.lab[1:]:
        if loss != "host" or machine.name != program.adder:
            wait_until(lambda machine=machine: machine.processes("[r]un_worker_loop") == 0, 30, "pods end")
