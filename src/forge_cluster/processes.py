"""Processes that daemons and launchers watch or start, and the arguments of their command lines."""

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from forge.runtime.process import end_with_parent


def is_descendant(pid: int, ancestor: int) -> bool:
    """Return whether a process exists and was started by the process `ancestor` or by one of its descendants."""
    while pid > 1:
        # The parent's id is the second field after the name, which is in parentheses and may contain spaces.
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
        if pid == ancestor:
            return True
    return False


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


def check_words(words: Iterable[str]) -> None:
    """Check the arguments of a command. ValueError: one contains a NUL or a lone surrogate, half of a character."""
    for word in words:
        if re.search("[\0\ud800-\udfff]", word):
            raise ValueError(f"{word[:80]!a} cannot be a word of a command: it has a NUL or half a character")
