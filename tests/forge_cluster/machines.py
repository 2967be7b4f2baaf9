"""Several machines on one, out of Linux namespaces: each has its own network and address, host name, processes, disk,
/tmp, /dev/shm and boot id. Cables are pulled, power is cut, machines come back empty.

    with Machines(3, shared=["/srv/run"]) as lab:
        lab[0].run(["hostname"])            # m1; `start` for what goes on
        lab[1].cut(); lab[1].heal()
        lab[2].kill(); lab[2].boot()

Machine i is `mi`, 10.77.0.i, behind a bridge in a namespace of its own: nothing of this host's network is touched. All
of it ends with the process that made it, however that ends. Folders in `shared` are the same on all, as NFS would be.
It takes Linux, iproute2, util-linux and root.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECRET = "a secret of the tests, long enough to be one"

# The processes of this namespace die with its first one, and so do those of the namespaces inside it.
SWITCH = "ip link set lo up && ip link add br0 type bridge && ip link set br0 up && echo up && exec sleep infinity"
# $0 is the machine's name, $1 its boot id, the rest is shared. It is mounted over /mnt, in its own view of the files.
BOOT = """
set -e
read -r pid _ </proc/self/stat         # its number on this host, whose /proc it still sees
new=/mnt name=$0 mark=$1; shift
mount -t tmpfs -o size=2g none "$new"; mkdir "$new/up" "$new/work" "$new/root"
mount -t overlay none -o "lowerdir=/,upperdir=$new/up,workdir=$new/work" "$new/root" 2>/dev/null ||
    mount --rbind / "$new/root"        # without root, in a user namespace: the disk is this host's then
mount --rbind /dev "$new/root/dev"; mount -t proc none "$new/root/proc"
mount -t sysfs none "$new/root/sys" 2>/dev/null || mount --rbind /sys "$new/root/sys"   # its own /sys/class/net
for private in tmp run; do mount -t tmpfs -o mode=1777,size=2g none "$new/root/$private"; done
mount -t tmpfs -o mode=1777,size=4g none "$new/root/dev/shm"
for path; do mkdir -p "$new/root$path"; mount --bind "$path" "$new/root$path"; done
hostname "$name"; cd "$new/root"; mkdir tmp/old; pivot_root . tmp/old; cd /; umount -l /tmp/old; rmdir /tmp/old
echo "$name" >/run/hostname; echo "$mark" >/run/boot_id
(echo 127.0.0.1 localhost; for i in $(seq 80); do echo "10.77.0.$i m$i"; done) >/run/hosts
for file in hostname hosts; do mount --bind "/run/$file" "/etc/$file"; done
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
ip link set lo up; echo "$pid"; exec >/dev/null 2>&1; sleep infinity & wait   # reaps what is left behind in it
"""
PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
}


def spawn(words: Sequence[str], **settings: Any) -> subprocess.Popen:
    """Start a process that ends with the thread that started it.

    `preexec_fn` would run Python in a fork of these tests, whose other threads may hold the loader's or malloc's lock.
    """
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *words], **settings)


def inside(process: subprocess.Popen) -> int:
    """The id, on this host, of what a `start` has started: `process` is the nsenter that waits for it."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def missing() -> str | None:
    """Why machines cannot be made here, if they cannot."""
    try:
        with Machines(1):
            return None
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return f"no machines out of namespaces here: {error}"


class Machine:
    """One of them. `pid` is its first process, as seen from this host."""

    def __init__(self, lab: Machines, number: int) -> None:
        self.lab, self.number, self.name, self.address = lab, number, f"m{number}", f"10.77.0.{number}"
        self.port, self.boots = f"port{number}", 0  # the bridge's side of its cable
        self._started: list[subprocess.Popen] = []
        self.boot()

    def boot(self) -> None:
        """Switch it on: nothing that it ever wrote is there, except in the shared folders."""
        self.boots += 1
        mark = f"{os.getpid():08x}-0000-4000-8000-{self.number:06x}{self.boots:06x}"
        # The switch's processes and network, this host's files: it dies with the switch and sees this host's /proc.
        enter = f"nsenter --target={self.lab.pid} --net --pid unshare --mount --net --uts --ipc --pid --fork "
        enter += "--kill-child --propagation=private sh -c"
        self._init = spawn([*enter.split(), BOOT, self.name, mark, *self.lab.shared], **PIPES)
        assert self._init.stdout is not None
        said = self._init.stdout.readline()
        if not said:
            raise RuntimeError(f"{self.name} did not come up: {self._init.communicate()[1]}")
        self.pid = int(said)
        card = f"name eth0 address 02:00:0a:4d:00:{self.number:02x}"  # always the same: the others remember it
        self.lab.ip(f"link add {self.port} master br0 up type veth peer {card} netns {self.pid}")
        self.run(["sh", "-c", f"ip link set eth0 up; ip addr add {self.address}/24 dev eth0"], check=True)

    def command(self, words: Sequence[str], cwd: str = "/") -> list[str]:
        """What to run on this host in order to run `words` there."""
        return ["nsenter", f"--target={self.pid}", "-m", "-n", "-u", "-i", "-p", f"--wdns={cwd}", "--", *words]

    def run(self, words: Sequence[str], cwd: str = "/", **settings: Any) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(words, cwd), **settings)

    def start(self, words: Sequence[str], cwd: str = "/", **settings: Any) -> subprocess.Popen:
        """Ends with this process, and with the machine."""
        self._started.append(spawn(self.command(words, cwd), **settings))
        return self._started[-1]

    def work(self, *options: str, secret: str = SECRET, **settings: Any) -> subprocess.Popen:
        """Start `forge worker`, at the default port."""
        own = [sys.executable, "-m", "forge", "worker", "--listen", self.address, "--gpus", "", *options]
        return self.start(own, str(ROOT), env=environment(secret), **settings)

    def processes(self, command: str) -> int:
        """How many processes there have this in their command line."""
        found = self.run(["pgrep", "-fc", command], capture_output=True, text=True)
        return int(found.stdout or 0)

    def cut(self) -> None:
        """Pull its cable: connections hang."""
        self.lab.ip(f"link set {self.port} down")

    def heal(self) -> None:
        self.lab.ip(f"link set {self.port} up")

    def slow(self, rate: str) -> None:
        """Limit what it receives, for example to 1gbit."""
        self.lab.tc(f"qdisc replace dev {self.port} root tbf rate {rate} burst 256kb latency 50ms")

    def kill(self) -> None:
        """Cut its power: every process is gone, no connection is closed in an orderly way."""
        self.lab.ip(f"link del {self.port}")  # first: the kernel would close the connections of dying processes
        os.kill(self.pid, signal.SIGKILL)
        self.bury()

    def bury(self) -> None:
        """Its namespace ends when the last of its processes was waited for; an nsenter stops with what it runs."""
        for process in self._started:
            process.kill()
            process.wait()
        self._started.clear()
        self._init.communicate()


class Machines(list[Machine]):
    """`count` machines on a network of their own."""

    def __init__(self, count: int, shared: Sequence[str | Path] = ()) -> None:
        self.shared = [str(Path(path).resolve()) for path in shared]
        enter = "unshare --net --pid --mount --fork --kill-child --mount-proc --propagation=private sh -c"
        self._switch = spawn([*enter.split(), SWITCH], **PIPES)
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "up\n":
            raise RuntimeError(f"no namespaces here: {self._switch.communicate()[1]}")
        self.pid = inside(self._switch)
        super().__init__(Machine(self, number) for number in range(1, count + 1))

    def ip(self, words: str) -> str:
        """`ip` on the switch, whose ports are port1, port2, ..."""
        return self._on_switch("ip", words)

    def tc(self, words: str) -> str:
        return self._on_switch("tc", words)

    def _on_switch(self, program: str, words: str) -> str:
        command = ["nsenter", f"--target={self.pid}", "--net", program, *words.split()]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)  # and with it every process of every machine
        for machine in self:
            machine.bury()
        self._switch.communicate()


class Controller:
    """A program of `tests.forge_cluster.controllers` on a machine."""

    def __init__(self, machine: Any, *words: str, hosts: str, **more: str) -> None:
        own = environment(FORGE_HOSTS=hosts, **more)
        command = [sys.executable, "-m", "tests.forge_cluster.controllers", *words]
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

    def ask(self, what: str, **values: object) -> Any:
        self.send(what, **values)
        answer = self.read("answer")
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def end(self) -> None:
        self.send("end")
        assert self.process.wait(30) == 0


def trained(run: Path) -> str:
    """The digest of a run's weights, after a check that nearly each of its steps has changed them."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    norms = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    assert norms, f"no step in {run}"
    assert norms.count(0.0) <= 0.05 * len(norms), f"{norms.count(0.0)} of {len(norms)} steps without a gradient"
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def listens(machine: Machine, port: int = 7070) -> bool:
    return f":{port} " in machine.run(["ss", "-ltn"], capture_output=True, text=True).stdout


def environment(secret: str = SECRET, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    own = {"PYTHONPATH": path, "FORGE_SECRET": secret, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, **more}


def wait_until(done: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for something; how long it took.

    Raises:
        AssertionError: it did not happen in time.
    """
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)
    return time.monotonic() - began
