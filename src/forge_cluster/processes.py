"""Processes that daemons and launchers watch or start, and the arguments of their command lines."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from forge.runtime.process import end_with_parent

START_TIMEOUT = 120.0  # seconds for a worker to listen: it counts its GPUs first


class NotStarted(RuntimeError):
    """Error: a worker did not start; the message names the machine."""


@contextmanager
def start_workers(commands: Mapping[str, Sequence[str]], secret: str) -> Iterator[list[str]]:
    """Start workers, `forge worker --stdin`, and yield their addresses once all listen.

    They end with the block, or if this process ends in any way, which closes their standard input.

    Args:
        commands: of each worker, by the name of its machine.
        secret: of the run.

    Raises:
        NotStarted: one of them did not start.
    """
    started: dict[str, Any] = {}  # processes
    try:
        for name, command in commands.items():
            # In a new session, which Ctrl-C does not reach, so that the controller ends first.
            process: Any = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
            started[name] = process
            # By standard input: other users can read the arguments of a process.
            with suppress(BrokenPipeError):  # it ended, which `_read_address` reports
                process.stdin.write(f"{secret}\n")
        yield [_read_address(name, process) for name, process in started.items()]
    finally:
        for process in started.values():
            with suppress(BrokenPipeError):  # it ended before it read the secret
                process.stdin.close()
        for process in started.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _read_address(name: str, process: subprocess.Popen) -> str:
    """Return the address that a worker prints when it listens. NotStarted: it printed none in time."""
    lines: list[str] = []

    # Read in a thread: a read has no timeout, and ssh may wait forever for a password.
    reader = threading.Thread(
        target=lambda file: lines.append(file.readline().strip()), args=(process.stdout,), daemon=True
    )
    reader.start()
    reader.join(START_TIMEOUT)
    if not lines or not lines[0]:
        outcome = f"ended with {process.wait(10)}" if lines else f"said nothing within {START_TIMEOUT:g} s"
        raise NotStarted(f"the worker on {name} {outcome}: see its output above")
    return lines[0]


def run_as_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and return its exit code.

    SIGTERM and SIGUSR1 of this process are forwarded to the command, which also gets SIGTERM when this process ends.
    SIGINT is ignored here, as a terminal sends Ctrl-C to both.
    """
    parent = os.getpid()
    process = subprocess.Popen(
        command, env=dict(environment), preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM)
    )
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    signal.signal(signal.SIGINT, lambda *_: None)
    return process.wait()


def submit_text(command: Sequence[str], text: str) -> str:
    """Pass a script or manifests to a program such as sbatch or kubectl, and return the program's output.

    Raises:
        RuntimeError: the program is not installed, or did not accept the text; the message quotes its error.
    """
    try:
        process = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(
            f"{command[0]} is not installed on this machine: submit from a machine that has it, or use --dry-run"
        ) from None
    if process.returncode:
        raise RuntimeError(f"{command[0]} rejected the job: {process.stderr.strip()}")
    return process.stdout.strip()
