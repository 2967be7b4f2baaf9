"""Computations beside the rewards, in a helper process.

Rewards run in threads, where timeouts by signals do not work, and no signal interrupts one huge integer power. So each
process starts one helper for a program, `helper_process`, which loads it once and forks a child for every question. The
helper ends with its owner, when its stdin closes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

_LOOP = Path(__file__).with_name("helper_process.py")


class Helper:
    """The helper process of one program.

    Args:
        program: a file that defines `equal(*question) -> bool`, and `prepare(line)`, which loads what a question needs.
    """

    def __init__(self, program: Path) -> None:
        self._program = program
        self._after_fork()
        # Two processes must not share one helper's pipes.
        os.register_at_fork(after_in_child=self._after_fork)
        self._verdict = lru_cache(maxsize=4096)(self._judge)  # degenerate policies repeat themselves
        self._is_fast = lru_cache(maxsize=1024)(lambda of_itself: self._ask(of_itself) is not None)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def verdict(self, question: list[Any], of_itself: list[Any]) -> bool | None:
        """Whether the two sides of a question are equal; None if the target takes too much CPU time even compared with
        itself. RuntimeError: the helper process does not run."""
        return self._verdict(json.dumps(question), json.dumps(of_itself))

    def _judge(self, question: str, of_itself: str) -> bool | None:
        verdict = self._ask(question)
        # If the target alone is fast, the answer is slow and so wrong: slow answers must not escape a verdict.
        return False if verdict is None and self._is_fast(of_itself) else verdict

    def _ask(self, question: str) -> bool | None:
        """The helper's verdict; None after its CPU time."""
        with self._lock:
            for _ in range(2):  # the helper may have been killed since the last call
                if self.process is None or self.process.poll() is not None:
                    # -P keeps this folder off the helper's path, where math.py would hide the standard library's.
                    self.process = subprocess.Popen(
                        [sys.executable, "-P", str(_LOOP), str(self._program)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                        env={**os.environ, "PYTHONHASHSEED": "0"},
                    )
                assert self.process.stdin
                assert self.process.stdout
                try:
                    self.process.stdin.write(question + "\n")
                    self.process.stdin.flush()
                    reply = self.process.stdout.readline()
                except BrokenPipeError:
                    reply = ""
                if reply:
                    return {"equal\n": True, "different\n": False}.get(reply)
                status = self.process.wait()
            raise RuntimeError(f"{self._program.name} ends at once, with status {status}; its error is on stderr")
