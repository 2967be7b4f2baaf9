"""Sandboxes of each level and user, and a neighbourhood that programs attack."""

import asyncio
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forge_sandbox import Sandbox

ORDINARY = 12345
SELF = "user" if os.geteuid() else "root"
CASES = [pytest.param("namespaces", user, id=user) for user in ("root", "user")]
REPOSITORY = Path(__file__).parents[3]


def python_of(user: int | None) -> str:
    """An interpreter that the user can start: that of the tests may lie in a folder of root's."""
    own = os.path.realpath(sys.executable)
    if user is None:
        return own
    for python in (own, "/usr/bin/python3"):
        words = [python, "-I", "-c", "import sys; assert sys.version_info >= (3, 10)"]
        try:
            if subprocess.run(words, user=user or ORDINARY, stderr=subprocess.DEVNULL).returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("no Python that an ordinary user can start")


def whose(name: str) -> int | None:
    if name == "root" and os.geteuid():
        pytest.skip("the tests do not run as root")
    return ORDINARY if name == "user" and not os.geteuid() else None


_OPEN: dict[tuple[str, str], Sandbox | str] = {}


def opened(level: str, user: str, **settings) -> Sandbox:
    """A sandbox that is started."""
    number = whose(user)
    sandbox = Sandbox(level, user=number, python=python_of(number), **settings)
    asyncio.run(sandbox.start())
    return sandbox


@pytest.fixture(scope="session")
def sandboxes():
    """The sandbox of a level and a user, the same for all tests."""

    def get(level: str, user: str) -> Sandbox:
        if (level, user) not in _OPEN:
            try:
                _OPEN[level, user] = opened(level, user, workers=1)
            except pytest.skip.Exception as skipped:
                _OPEN[level, user] = str(skipped)
        found = _OPEN[level, user]
        if isinstance(found, str):
            pytest.skip(found)
        return found

    yield get
    for sandbox in _OPEN.values():
        if isinstance(sandbox, Sandbox):
            asyncio.run(sandbox.close())
    _OPEN.clear()


_LIBC = ctypes.CDLL(None)
_OBJECTS = """
import ctypes, os, struct, sys
libc, text = ctypes.CDLL(None), os.environ["SECRET"].encode()
queue = libc.msgget(0, 0o600)
libc.msgsnd(queue, struct.pack("l", 1) + text, len(text), 0)
libc.mq_open(sys.argv[1].encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
print(queue, libc.semget(0, 1, 0o600), libc.shmget(0, 4096, 0o600))
"""


@dataclass
class Neighbourhood:
    """Of one user: a process, files, sockets, queues, semaphores and shared memory, and how they should be."""

    user: int
    folder: Path
    name: str = field(default_factory=lambda: "f" + secrets.token_hex(6))
    text: str = field(default_factory=lambda: secrets.token_hex(16))
    objects: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.secret, self.owned = self.folder / "secret", self.folder / "owned"
        for path in (self.secret, self.owned):
            path.write_text(self.text)
        for path in (self.folder, self.secret, self.owned):
            os.chown(path, self.user, self.user)
        self.folder.chmod(0o777)
        self.listening = [socket.create_server(("127.0.0.1", 0))]
        for address, kind in (
            ("stream", socket.SOCK_STREAM),
            ("datagram", socket.SOCK_DGRAM),
            ("", socket.SOCK_STREAM),
        ):
            unix = socket.socket(socket.AF_UNIX, kind)
            unix.bind(str(self.folder / address) if address else f"\0{self.name}")
            if address:
                (self.folder / address).chmod(0o777)
            if kind == socket.SOCK_STREAM:
                unix.listen()
            self.listening.append(unix)
        self.files = {path.name for path in self.folder.iterdir()}
        self.inherited = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self.inherited, True)
        self._start()

    def _start(self) -> None:
        as_user = {} if os.geteuid() else {"user": self.user, "group": self.user}
        self.victim = subprocess.Popen(["sleep", "1000"], env={"SECRET": self.text}, **as_user)
        self._remove_objects()
        words = [python_of(None if os.geteuid() else self.user), "-I", "-S", "-c", _OBJECTS, f"/{self.name}"]
        made = subprocess.run(words, env={"SECRET": self.text}, stdout=subprocess.PIPE, check=True, **as_user).stdout
        self.objects = [int(number) for number in made.split()]
        self.before = self._state()

    def _state(self) -> list[object]:
        pid, file = self.victim.pid, self.owned.stat()
        with open(f"/proc/{pid}/limits") as limits:
            files = next(line for line in limits if line.startswith("Max open files"))
        return [
            *(files, os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), os.sched_getscheduler(pid)),
            *(file.st_mode, file.st_mtime, file.st_size, os.listxattr(self.owned), self.secret.read_text()),
            *map(_object, ("msg", "sem", "shm"), self.objects),
            self._has_queue(),
        ]

    def _has_queue(self) -> bool:
        if (queue := _LIBC.mq_open(f"/{self.name}".encode(), os.O_RDONLY)) >= 0:
            os.close(queue)
        return queue >= 0

    def _remove_objects(self) -> None:
        remove = (_LIBC.msgctl, lambda number, *_: _LIBC.semctl(number, 0, 0), _LIBC.shmctl)
        for number, function in zip(self.objects, remove, strict=False):
            function(number, 0, None)
        self.objects = []
        _LIBC.mq_unlink(f"/{self.name}".encode())

    def fill(self, program: str) -> str:
        port = self.listening[0].getsockname()[1]
        values = {"victim": self.victim.pid, "secret": self.secret, "folder": self.folder, "name": self.name}
        values |= {"text": self.text, "port": port, "repository": REPOSITORY}
        values |= dict(zip(("queue", "semaphore", "memory"), self.objects, strict=True))
        for name, value in values.items():
            program = program.replace(f"@{name}@", str(value))
        return program

    def harm(self) -> str:
        """What has been done to it; "" if nothing."""
        if self.victim.poll() is not None:
            self._start()
            return "the neighbour was killed"
        harm = [f"{new} was {old}" for old, new in zip(self.before, self._state(), strict=True) if old != new]
        for path in self.folder.iterdir():
            if path.name not in self.files:
                harm.append(f"{path} was written")
                path.unlink()
        for place in (
            "/var/tmp",
            "/dev/shm",
            "/run",
            "/etc",
            "/usr/lib",
            "/root",
            os.path.dirname(os.__file__),
            "/tmp",
        ):
            path = Path(place) / self.name
            if os.access(place, os.X_OK) and path.exists():
                harm.append(f"{path} was written")
                path.unlink()
        for _ in range(2):  # a process that was just forked may not have its name yet
            for pid in filter(str.isdecimal, os.listdir("/proc")):
                try:
                    if Path(f"/proc/{pid}/comm").read_text().strip() == self.name:
                        harm.append("a daemon lives on")
                        os.kill(int(pid), 9)
                except OSError:
                    continue
            time.sleep(0)
        if harm:
            self.close_victim()
            self.owned.chmod(0o644)
            for path in (self.secret, self.owned):
                path.write_text(self.text)
            self._start()
        return "; ".join(harm)

    def close_victim(self) -> None:
        self.victim.kill()
        self.victim.wait()

    def close(self) -> None:
        self.close_victim()
        self._remove_objects()
        os.close(self.inherited)
        for each in self.listening:
            each.close()
        shutil.rmtree(self.folder)


def _object(kind: str, number: int) -> list[str]:
    """What the kernel says of it: who used it last, and when, among that."""
    with open(f"/proc/sysvipc/{kind}") as file:
        return next((line.split()[1:14] for line in file if line.split()[1] == str(number)), [])


@pytest.fixture(scope="session")
def neighbourhoods():
    made: dict[str, Neighbourhood] = {}

    def get(user: str) -> Neighbourhood:
        if user not in made:
            number = whose(user)
            own = os.geteuid() if number is None else number
            made[user] = Neighbourhood(own, Path(f"/tmp/forge-{secrets.token_hex(6)}"))
        return made[user]

    yield get
    for each in made.values():
        each.close()
