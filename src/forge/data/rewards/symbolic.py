"""Symbolic equality by math-verify, in a helper process.

Rewards run in threads, where math-verify's own timeouts (signals) do not work, and no signal interrupts one huge
integer power. So each process starts one helper, which loads math-verify and forks a child for every comparison; the
kernel kills a child that uses too much time or memory. The helper ends with its owner, when its stdin closes.

This file is also the helper's program. It imports nothing of forge, so that it starts fast.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from functools import lru_cache

CPU_SECONDS = 0.75  # CPU time rather than wall time: a verdict must not depend on how busy the machine is
MEMORY_BYTES = 2 << 30
MAX_CHARACTERS = 1000
MAX_SURPLUS = 120  # characters of an answer beyond four times those of the target
MAX_DEPTH = 12  # of nested brackets; math-verify takes exponential time over them
# The usual ways to write an enormous number: unequal at once rather than after CPU_SECONDS.
_ENORMOUS = re.compile(r"(?:\^|\*\*)[\s{(]*(?:\d{5,}|\d+[\s})]*(?:\^|\*\*|!))|(?<!\d)\d{5,}[\s})]*!")

_lock = threading.Lock()
_helper: subprocess.Popen[str] | None = None


@lru_cache(maxsize=4096)  # degenerate policies repeat themselves
def equivalent(answer: str, target: str) -> bool | None:
    """Whether two LaTeX or plain expressions are mathematically equal; None if the target takes more than CPU_SECONDS
    even compared with itself.

    Answers that do not parse, are not proven equal in CPU_SECONDS, or exceed MAX_CHARACTERS, MAX_SURPLUS or MAX_DEPTH
    are not equal.

    Raises:
        RuntimeError: the helper process does not run.
    """
    if len(answer) > 4 * len(target) + MAX_SURPLUS or _depth(answer) > max(MAX_DEPTH, _depth(target)):
        return False
    verdict = _ask(answer, target)
    # If the target alone is fast, the answer is slow and so wrong: slow answers must not escape a verdict.
    return False if verdict is None and _is_fast(target) else verdict


def _depth(text: str) -> int:
    """How deep brackets nest, of all kinds."""
    depth = deepest = 0
    for bracket in re.findall(r"[(\[{}\])]", text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=1024)
def _is_fast(target: str) -> bool:
    return _ask(target, target) is not None


def _ask(answer: str, target: str) -> bool | None:
    """The helper's verdict; None after CPU_SECONDS."""
    global _helper
    if max(len(answer), len(target)) > MAX_CHARACTERS or _ENORMOUS.search(answer):
        return False
    with _lock:
        for _ in range(2):  # the helper may have been killed since the last call
            if _helper is None or _helper.poll() is not None:
                # -P keeps this folder off the helper's path, where math.py would hide the standard library's.
                _helper = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONHASHSEED": "0"},
                )
            assert _helper.stdin
            assert _helper.stdout
            try:
                _helper.stdin.write(json.dumps([answer, target]) + "\n")
                _helper.stdin.flush()
                reply = _helper.stdout.readline()
            except BrokenPipeError:
                reply = ""
            if reply:
                return {"equal\n": True, "different\n": False}.get(reply)
            status = _helper.wait()
        raise RuntimeError(f"the math-verify process ends at once, with status {status}; its error is on stderr")


def _after_fork() -> None:
    """Two processes must not share one helper's pipes."""
    global _lock, _helper
    _lock, _helper = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)


def _equal(answer: str, target: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy import Basic, nan, zoo

    def parsed(text: str) -> list:
        # The plain grammar picks expressions out of prose, so it only gets text that is an expression throughout.
        if re.fullmatch(r"[\d\s.+\-*/()^]+", text):
            return parse(text, [ExprExtractionConfig()], parsing_timeout=None)
        return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)

    answers = parsed(answer)
    # sympy's verdict on an undefined value such as 0/0 varies from process to process.
    if any(part.doit().has(nan, zoo) for part in answers if isinstance(part, Basic)):
        return False
    return verify(parsed(target), answers, timeout_seconds=None)


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    _equal(r"\frac{1}{2}", "0.5")  # loads everything before the first fork
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                status = 0 if _equal(*json.loads(line)) else 1
            finally:
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        print("unknown" if os.WIFSIGNALED(status) else "different" if status else "equal", flush=True)


if __name__ == "__main__":
    _serve()
