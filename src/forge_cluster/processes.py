"""Processes that daemons and launchers watch or start, and the words of their command lines."""

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from forge.runtime.process import end_with_parent


def is_descendant(pid: int, ancestor: int) -> bool:
    """Return whether a process exists and was started by `ancestor`, or by one that it started."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
        if pid == ancestor:
            return True
    return False


def run_as_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and return its exit code. This process's SIGTERM and SIGUSR1 are forwarded, and the
    command gets SIGTERM when this process is lost; a terminal sends Ctrl-C to both."""
    parent = os.getpid()
    process = subprocess.Popen(
        command, env=dict(environment), preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM)
    )
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    signal.signal(signal.SIGINT, lambda *_: None)
    return process.wait()


def check_words(words: Iterable[str]) -> None:
    """Raise ValueError for a word that is not valid as an argument: it has a NUL, or half a character."""
    for word in words:
        if re.search("[\0\ud800-\udfff]", word):
            raise ValueError(f"{word[:80]!a} cannot be a word of a command: it has a NUL or half a character")
