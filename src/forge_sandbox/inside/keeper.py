"""The keeper, the parent process of a program: it reads a request, forks and monitors the program, replies and exits.

Each request has its own keeper, so that a program cannot find another one's data in its memory. It is the first process
of its namespace: when it exits, the kernel kills all processes that the program has started.
"""

import fcntl
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from . import limits, namespaces, program, seccomp, wire
from .syscalls import die_with_parent, make_call, prctl
from .wire import Settings

# What is written to `setup` once confinement has succeeded, before the program starts.
BEGUN = b"+"
SETUP_FAILED = 125  # exit code if confinement failed
_KILL_TIMEOUT = 5.0  # seconds for killed processes to exit
_CHECK_INTERVAL = 0.05  # seconds between checks of memory and CPU time


def confine_and_run(settings: Settings, run: Callable[[int], None], setup: int) -> None:
    """Confine this process, run the program in it, and exit.

    Args:
        settings: arguments of `forge_sandbox.worker.Worker`.
        run: runs the program and exits the process; its argument is `setup`.
        setup: a descriptor, to which `BEGUN` is written, or the error if confinement fails.
    """
    try:
        os.setsid()
        die_with_parent()
        # All descriptors but this one and 0, 1 and 2.
        if setup > 3:
            make_call("close_range", 3, setup - 1, 0)
        make_call("close_range", setup + 1, (1 << 31) - 1, 0)
        tasks = None

        if settings["level"] == "namespaces":
            # The limit is for all processes of the user. As root, the program gets a separate user in its namespace;
            # otherwise the three processes above it belong to the same user, and count too.
            tasks = settings["processes"] + (3 if os.geteuid() else 0)
            if not os.geteuid():
                limits.drop_bounds()
                # For root, process limits and file permissions do not apply.
                os.setgroups([])
                os.setresgid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
                os.setresuid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
                # A change of the user clears PR_SET_DUMPABLE, without which a process cannot open its /proc/self.
                prctl(4, 1)

        os.chdir(settings["folder"])
        limits.limit_process(settings["limits"], tasks)
        if settings["level"] == "namespaces":
            # Last, as these calls need capabilities or are denied by the filter: everything else is done before.
            limits.drop_capabilities()
            prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
            seccomp.install_filter(
                seccomp.filter_program(forks=settings["processes"] > 1, network="network" in settings)
            )
    except BaseException as error:
        os.write(setup, f"{type(error).__name__}: {error}".encode())
        os._exit(SETUP_FAILED)

    os.write(setup, BEGUN)
    run(setup)
    os._exit(0)


def keep_program(control: int, settings: Settings) -> None:
    """Answer one request; the caller exits after that.

    Args:
        control: the socket's descriptor.
    """
    # PR_SET_CHILD_SUBREAPER: processes whose parent exits become children of this process, which can then kill them.
    prctl(36, 1)
    header, (source, stdin) = wire.unpack_message(lambda size: os.read(control, size))
    if "command" in header:
        run = partial(program.run_command, header["command"], header["env"])
    else:
        run = partial(program.run_program, source.decode("utf-8", "surrogatepass"))
    running = Running(control, settings, run, stdin)
    _send_reply(control, running, running.watch(header["time_limit"]))


class Running:
    """A program that is started, and its output so far.

    Args:
        control: the socket's descriptor.
        run: runs the program in the forked process.
        stdin: its input.
    """

    def __init__(self, control: int, settings: Settings, run: Callable[[int], None], stdin: bytes) -> None:
        self.control = control
        self.settings = settings
        self.max_output = settings["output_kb"] << 10
        out, error, setup = (os.pipe() for _ in range(3))
        self.began = time.monotonic()
        self.pid = os.fork()

        if not self.pid:
            try:
                for descriptor, number in ((_sealed_file(stdin), 0), (out[1], 1), (error[1], 2)):
                    os.dup2(descriptor, number)
                confine_and_run(settings, run, setup[1])
            finally:
                os._exit(SETUP_FAILED)

        for pipe in (out, error, setup):
            os.close(pipe[1])
            os.set_blocking(pipe[0], False)
        self.out, self.error, self.setup = out[0], error[0], setup[0]
        self.exited = os.pidfd_open(self.pid)
        self.texts = {descriptor: bytearray() for descriptor in (self.out, self.error, self.setup)}
        self.ended: int | None = None
        self.cpu = 0.0  # of all its processes, when last measured

    def watch(self, limit: float) -> str:
        """Wait until the program has exited, or kill it at a limit, and return "exited" or the limit's name.

        Args:
            limit: the wall-clock seconds that it may take.
        """
        next_check = self.began
        deadline = self.began + limit
        poll = select.poll()
        for descriptor in (self.control, self.exited, *self.texts):
            poll.register(descriptor, select.POLLIN)
        status = ""

        while not status:
            remaining = deadline - time.monotonic()
            # It wakes up regularly for the limits that the kernel does not enforce for a whole tree of processes.
            ready = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, min(remaining, _CHECK_INTERVAL)))}
            if self.control in ready:
                self._kill_program()
                os._exit(0)  # the caller sends nothing while a program runs, so it has closed the socket
            for descriptor in ready & self.texts.keys():
                if not self._read_output(descriptor):
                    poll.unregister(descriptor)

            if self._has_filled():
                status = "output"
            elif self.exited in ready:
                status = "exited"
            elif remaining <= 0:
                status = "timeout"
            elif time.monotonic() > next_check:
                next_check = time.monotonic() + _CHECK_INTERVAL
                self._reap_children()
                status = self._check_usage()

        self._kill_program()
        # Its last output may still be in the pipes.
        for descriptor, text in self.texts.items():
            size = -1
            while size != len(text):
                size = len(text)
                self._read_output(descriptor)

        return "output" if self._has_filled() else status

    def _check_usage(self) -> str:
        """Return "timeout" or "memory" if the program's processes together exceed that limit, otherwise ""."""
        processes = limits.list_descendants(limits.self_pid())
        memory, self.cpu = limits.measure_usage(processes)
        if self.cpu > self.settings["cpu_seconds"]:
            return "timeout"
        max_memory = self.settings["memory_mb"] << 20
        # The first measure counts shared pages several times; the exact one is slow, and only needed beyond the limit.
        return "memory" if memory > max_memory and limits.proportional_memory(processes) > max_memory else ""

    def _has_filled(self) -> bool:
        return max(len(self.texts[self.out]), len(self.texts[self.error])) > self.max_output

    def _read_output(self, descriptor: int) -> bool:
        """Read available output, of which at most one byte beyond the limit is kept; return False at its end."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        text = self.texts[descriptor]
        text += chunk[: self.max_output + 1 - len(text)]
        return bool(chunk)

    def _reap_children(self) -> None:
        """Collect the exit statuses of children that have exited, and keep the program's."""
        with suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                if child[0] == self.pid:
                    self.ended = child[1]

    def _kill_program(self) -> None:
        """Kill the program and wait for its end; at level "none" also its descendants, which no namespace ends."""
        deadline = time.monotonic() + _KILL_TIMEOUT
        while True:
            self._reap_children()
            victims = set() if self.ended is not None else {self.pid}
            if self.settings["level"] == "none":
                victims |= {*limits.list_descendants(os.getpid())}
            if not victims:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"a program was killed and has not ended within {_KILL_TIMEOUT:g} s")
            for victim in victims:
                with suppress(ProcessLookupError):  # it has exited since it was listed
                    os.kill(victim, signal.SIGKILL)
            time.sleep(0.0005)


def _send_reply(control: int, running: Running, status: str) -> None:
    seconds = time.monotonic() - running.began
    out, error, setup = (bytes(running.texts[pipe]) for pipe in (running.out, running.error, running.setup))

    # `confine_and_run` writes BEGUN to the pipe `setup` just before it executes the program. Without it the program was
    # never started, which is the sandbox's fault.
    if not setup.startswith(BEGUN) and status != "timeout":
        reason = (setup + b" " + error).decode("utf-8", "replace").strip()
        return wire.send_message(control, {"failed": reason or f"{status} before it started"})

    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    header = {
        "status": status,
        "exit_code": os.waitstatus_to_exitcode(running.ended or 0),
        "seconds": seconds,
        "cpu_seconds": max(children.ru_utime + children.ru_stime, running.cpu),
        # After BEGUN, `run_command` writes the name of a command that cannot be executed.
        "missing": setup.removeprefix(BEGUN).decode("utf-8", "replace"),
    }

    return wire.send_message(control, header, out[: running.max_output], error[: running.max_output])


def _sealed_file(content: bytes) -> int:
    """Return the descriptor of a new file in memory with this content, which cannot be changed."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)  # all four: against writing, growing, shrinking and other seals
    return descriptor
