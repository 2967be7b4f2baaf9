"""The keeper of one run of an agent: confines its program, watches it, and reports how it ended.

It is a process of the standard library alone with an empty environment, so that the program finds nothing of the
controller in it. Between it and the program is the first process of a namespace, whose end is the end of all that the
program has started. However the controller ends, the keeper sees its socket close and ends the namespace.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from forge_sandbox.inside import confine, jail, limits, namespaces, seccomp
from forge_sandbox.inside.syscalls import die_with_parent, prctl

Settings = dict[str, Any]  # as `forge_agents.command` makes them
CHECK_INTERVAL = 0.05  # seconds between two looks at memory, and at the controller
KILL_TIMEOUT = 5.0  # seconds for killed processes to end
TAIL = 1 << 16  # bytes of each output that are returned
# Options of prctl.
_SUBREAPER = 36
_NO_NEW_PRIVILEGES = 38
_SET_FLAGS = 0x8914  # SIOCSIFFLAGS
_UP = 0x41  # IFF_UP and IFF_RUNNING
_NO_SUID, _NO_DEVICE, _NO_EXEC = 2, 4, 8  # flags of mount
_MISSING = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR)
_ALWAYS_IN_DEV = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}


def main(settings_descriptor: int, result_descriptor: int, control_descriptor: int) -> None:
    """Run one program; the settings and the result are JSON in files, the control socket ends with the controller."""
    with os.fdopen(settings_descriptor) as file:
        settings = json.load(file)
    control = socket.socket(fileno=control_descriptor)
    try:
        result = _Run(settings, control).watch()
    except Exception as error:  # a failure of the keeper must not look like one of the program
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    with os.fdopen(result_descriptor, "w") as file:
        json.dump(result, file)


class _Run:
    """A running program with its output."""

    def __init__(self, settings: Settings, control: socket.socket) -> None:
        self.settings = settings
        self.control = control
        self.isolated = settings["level"] == "namespaces"
        limits.open_proc()  # the namespaces have another one
        out, error, report = (os.pipe() for _ in range(3))
        self.began = time.monotonic()
        if self.isolated:
            namespaces.enter(settings["network"] == "gateway")
        else:
            prctl(_SUBREAPER, 1)  # orphans become children of this process, which kills them
        self.pid = os.fork()
        if not self.pid:
            outputs = (out[1], error[1], report[1])
            if self.isolated:
                _be_first(settings, control, *outputs)
            _be_program(settings, *outputs)
        for pipe in (out, error, report):
            os.close(pipe[1])
            os.set_blocking(pipe[0], False)
        self.report = report[0]
        self.exited = os.pidfd_open(self.pid)
        self.tails = {out[0]: bytearray(), error[0]: bytearray(), self.report: bytearray()}
        self.written = dict.fromkeys(self.tails, 0)

    def watch(self) -> dict[str, Any]:
        """Wait until the program has ended, or end it at a limit; returns the result."""
        poll = select.poll()
        for descriptor in (self.control.fileno(), self.exited, *self.tails):
            poll.register(descriptor, select.POLLIN)
        status = ""
        reason = ""
        deadline = self.began + self.settings["timeout"]
        next_check = self.began
        while not status:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * CHECK_INTERVAL)}
            # A fork of the controller may hold its end of the socket, hence the second condition.
            if self.control.fileno() in ready or os.getppid() != self.settings["parent"]:
                self._end()
                os._exit(0)
            for descriptor in ready & self.tails.keys():
                if not self._read(descriptor):
                    poll.unregister(descriptor)
            now = time.monotonic()
            if self.exited in ready:
                status = "exited"
            elif max(self.written.values()) > self.settings["output_kb"] << 10:
                status, reason = ("killed", f"its output exceeded output_kb ({self.settings['output_kb']})")
            elif now > deadline:
                status, reason = ("timeout", f"it ran for {self.settings['timeout']:g} s")
            elif now > next_check:
                next_check = now + CHECK_INTERVAL
                if self._memory() > self.settings["memory_mb"] << 20:
                    status, reason = ("memory", f"its processes used over {self.settings['memory_mb']} MB")
        code = self._end()
        seconds = time.monotonic() - self.began
        for descriptor in self.tails:
            while self._read(descriptor, drained=True):
                pass
        lines = self.tails[self.report].decode(errors="replace").splitlines()
        # What confined it and what started it write a line only where they fail; the first process, how it ended.
        for line in lines:
            word, _, rest = line.partition(" ")
            if word in ("missing", "failed"):
                status, reason = (word, rest)
            elif word == "ended":
                code = int(rest)
        if status == "exited" and code == -signal.SIGKILL:
            status, reason = ("killed", "SIGKILL, which neither this library nor a limit of it sent")
        out, error = (self.tails[descriptor].decode(errors="replace") for descriptor in [*self.tails][:2])
        result = {"status": status, "reason": reason, "exit_code": code, "stdout": out, "stderr": error}
        return {**result, "seconds": seconds, "confined": not lines or not lines[0].startswith("failed")}

    def _read(self, descriptor: int, drained: bool = False) -> bool:
        """Read what is available, and keep its end; False at the end of the pipe and, when `drained`, of the data."""
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return not drained
        self.written[descriptor] += len(part)
        tail = self.tails[descriptor]
        tail += part
        del tail[:-TAIL]
        return bool(part)

    def _memory(self) -> int:
        """Bytes of all its processes, with shared pages counted once where that decides."""
        processes = [*limits.descendants(self.pid), self.pid]
        memory, _ = limits.usage(processes)
        limit = self.settings["memory_mb"] << 20
        return limits.proportional_memory(processes) if memory > limit else memory

    def _end(self) -> int:
        """Kill all its processes; returns the exit code of the first, negative for a signal."""
        deadline = time.monotonic() + KILL_TIMEOUT
        code = 0
        victims = {self.pid}
        while victims:
            # In a namespace the first process takes all others with it; outside, orphans are children of this one.
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            with suppress(ChildProcessError):
                while True:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    if pid == self.pid:
                        code = os.waitstatus_to_exitcode(status)
                        victims.discard(pid)
            victims &= {self.pid}
            if not self.isolated:
                victims |= {*limits.descendants(os.getpid())}
            if time.monotonic() > deadline:
                raise TimeoutError(f"killed processes have not ended within {KILL_TIMEOUT:g} s")
            time.sleep(0.001)
        return code


def _be_first(settings: Settings, control: socket.socket, out: int, error: int, report: int) -> NoReturn:
    """Be the first process of the namespaces: make the file system and the network, start the program, collect what
    ends."""
    try:
        os.setsid()
        die_with_parent()
        _make_root(settings)
        if settings["network"] == "gateway":
            _make_network(settings["port"], control)
        control.close()
        program = os.fork()
        if not program:
            _be_program(settings, out, error, report)
    except BaseException as failure:
        _report(report, "failed", failure)
    # The program may not look into the memory of this process.
    prctl(confine.DUMPABLE, 0)
    confine.close_all_but(report)
    while True:
        pid, status = os.wait()
        if pid == program:
            os.write(report, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)


def _make_root(settings: Settings) -> None:
    paths = {"readable": settings["readable"]}
    links = jail.links_to(paths) | {f"/dev/{name}": target for name, target in _ALWAYS_IN_DEV.items()}
    readable = jail.readable_paths(paths)
    writable = {settings["inner_folder"]: settings["folder"], "/tmp": settings["scratch"]}
    namespaces.new_root(readable, links, writable, ("/dev/shm", "/dev/pts", "/var/tmp"))
    flags = _NO_SUID | _NO_DEVICE | _NO_EXEC
    namespaces.mount("tmpfs", "/dev/shm", "tmpfs", flags, "size=64m,mode=1777")
    with suppress(OSError):  # terminals are of few programs, and not permitted everywhere
        namespaces.mount("devpts", "/dev/pts", "devpts", _NO_SUID | _NO_EXEC, "newinstance,ptmxmode=0666,mode=0620")


def _make_network(port: int | None, control: socket.socket) -> None:
    """Set the loopback up. A socket belongs to the namespace that it was made in, so that the controller answers the
    connections of one that is made here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
    if port is not None:
        with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
            socket.send_fds(control, [b"listener"], [listener.fileno()])


def _be_program(settings: Settings, out: int, error: int, report: int) -> NoReturn:
    """Confine this process, and become the program."""
    try:
        os.setsid()
        if settings["level"] != "namespaces":
            die_with_parent()
        for descriptor, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (error, 2)):
            os.dup2(descriptor, standard)
        confine.close_all_but(report)
        # Python ignores these, and what a process ignores its program does, too.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        root = os.geteuid() == 0
        tasks = settings["processes"]
        if settings["level"] == "namespaces":
            # The keeper and the first process count where they are of the same user.
            tasks += 0 if root else 2
            if root:
                limits.drop_bounds()
                confine.become_user(namespaces.NOBODY)
        else:
            tasks += limits.tasks_of(os.geteuid())
        _limit(tasks)
        os.chdir(settings["inner_folder"])
        os.umask(0o022)
        if settings["level"] == "namespaces":
            limits.drop_capabilities()
            prctl(_NO_NEW_PRIVILEGES, 1)
            seccomp.install(seccomp.program_with_network())
    except BaseException as failure:
        _report(report, "failed", failure)
    try:
        # The report closes as the program starts.
        os.execvpe(settings["command"][0], settings["command"], settings["env"])
    except OSError as failure:
        _report(report, "missing" if failure.errno in _MISSING else "failed", failure)


def _limit(tasks: int) -> None:
    for kind, number in (
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_NOFILE, 4096),
        (resource.RLIMIT_FSIZE, 1 << 30),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 1 << 20),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:  # a lower limit of the caller remains
            number = min(number, hard)
        resource.setrlimit(kind, (number, number))


def _report(report: int, word: str, failure: BaseException) -> NoReturn:
    text = " ".join(f"{type(failure).__name__}: {failure}".split())
    os.write(report, f"{word} {text}\n".encode())
    os._exit(confine.SETUP_FAILED)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
