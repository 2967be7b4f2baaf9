"""A real Slurm cluster of a few machines: slurmctld on the first, slurmd on each of the others, munge between them.

Two partitions: `low`, the default, whose jobs are put back in the queue when a job in `high` needs their nodes. It
takes Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.forge_cluster.machines import Machine, Machines

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
SLURM_CONF = """
ClusterName=lab
SlurmctldHost=m1
SlurmUser=root
AuthType=auth/munge
# What a namespace has no cgroups of its own for:
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%h.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=m[2-{last}] CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""
# On each machine: munge as its own user, then one of Slurm's daemons. $0: folder, $1: daemon.
DAEMONS = """
set -e
mkdir -p /run/munge /var/spool/slurmctld /var/spool/slurmd /etc/munge /var/log/munge /var/lib/munge
install -m 400 -o munge -g munge "$0/munge.key" /etc/munge/munge.key
chown munge:munge /run/munge /var/log/munge /var/lib/munge; chmod 755 /run/munge
setpriv --reuid munge --regid munge --clear-groups munged
exec $1 -D
"""


def missing() -> str | None:
    """Which programs are not here, if any."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"no {', '.join(absent)} here (apt-get install slurmctld slurmd slurm-client munge)" if absent else None


class Slurm(Machines):
    """`count` machines, all but the first of them nodes of the cluster. `folder` is the same on all of them."""

    def __init__(self, count: int, shared: Sequence[str | Path] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="slurm-", dir="/var/tmp")  # /tmp is each machine's own
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o755)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(folder=self.folder, last=count))
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-1]\n")  # files that exist, no more
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        path = f"{os.environ['PATH']}:/usr/sbin"
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}
        super().__init__(count, [*shared, self.folder])
        for machine in self:
            self.serve(machine)
        self.wait(lambda: self.states().count("idle") == count - 1, 60, "idle nodes")

    def serve(self, machine: Machine) -> None:
        """Start the daemons; also after `machine.boot()`."""
        daemon = "slurmctld" if machine is self[0] else "slurmd"
        with (self.folder / f"{daemon}-{machine.name}.out").open("w") as log:
            words = ["sh", "-c", DAEMONS, str(self.folder), daemon]
            machine.start(words, env=self.environment, stdout=log, stderr=log)

    def say(self, *words: str, **settings: Any) -> str:
        """Run a command on the first machine; what it prints."""
        own = {"env": self.environment, "cwd": str(self.folder), **settings}
        done = self[0].run(words, capture_output=True, text=True, **own)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def states(self) -> list[str]:
        return self.say("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split()

    def state(self, job: str) -> str:
        """Of a job that is queued, runs or has ended, as scontrol names it."""
        words = self.say("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def wait(self, done: Callable[[], object], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                logs = [f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log"))]
                raise TimeoutError("\n".join([f"no {what} within {seconds:g} s; {self.states()}", *logs]))
            time.sleep(0.2)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._folder.cleanup()


def requeue_now(slurm: Slurm, job: str) -> None:
    """Have a job that waits after a requeue start again without Slurm's delay of two minutes.

    The delay protects from a start in the second in which the job's former credential was revoked: the new one is then
    rejected ("Job credential revoked"), and the job fails. Two seconds are enough.
    """
    time.sleep(2)
    subprocess.run(slurm[0].command(["scontrol", "update", f"JobId={job}", "StartTime=now"]), env=slurm.environment)
