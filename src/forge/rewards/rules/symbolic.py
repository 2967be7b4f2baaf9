"""Symbolic equality, in a helper process.

Rewards run in threads, where timeouts by signals do not work, and no signal interrupts one huge integer power. So each
process starts one helper, `symbolic_process`, which loads sympy and forks a child for every comparison. The helper ends
with its owner, when its stdin closes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from .expressions import Tree

# Bounds of an answer, far beyond any form of the target that a person would write.
MAX_SURPLUS = 120  # nodes beyond four times those of the target
MAX_DEPTH = 24  # nested operations
_PROGRAM = Path(__file__).with_name("symbolic_process.py")

_lock = threading.Lock()
_helper: subprocess.Popen[str] | None = None


def equivalent(kind: str, answer: Tree, target: Tree, tolerance: float) -> bool | None:
    """Whether two trees of `expressions` are equal; None if the target takes more than the helper's CPU time even
    compared with itself.

    Answers that are not proven equal in that time, or exceed MAX_SURPLUS or MAX_DEPTH, are not equal.

    Args:
        kind: "expression"; "equation" or "inequality" for differences of two sides, which are equal up to a factor.

    Raises:
        RuntimeError: the helper process does not run.
    """
    size, depth = _size(answer)
    target_size, target_depth = _size(target)
    if size > 4 * target_size + MAX_SURPLUS or depth > max(MAX_DEPTH, target_depth):
        return False
    return _verdict(json.dumps([kind, answer, target, tolerance]), json.dumps([kind, target, target, tolerance]))


@lru_cache(maxsize=4096)  # degenerate policies repeat themselves
def _verdict(question: str, of_itself: str) -> bool | None:
    verdict = _ask(question)
    # If the target alone is fast, the answer is slow and so wrong: slow answers must not escape a verdict.
    return False if verdict is None and _is_fast(of_itself) else verdict


@lru_cache(maxsize=1024)
def _is_fast(of_itself: str) -> bool:
    return _ask(of_itself) is not None


def _size(tree: Tree) -> tuple[int, int]:
    """The number of its nodes, and how deep they nest."""
    sizes = [_size(argument) for argument in tree[1:] if isinstance(argument, list)]
    return 1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)


def _ask(question: str) -> bool | None:
    """The helper's verdict; None after its CPU time."""
    global _helper
    with _lock:
        for _ in range(2):  # the helper may have been killed since the last call
            if _helper is None or _helper.poll() is not None:
                # -P keeps this folder off the helper's path, where math.py would hide the standard library's.
                _helper = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONHASHSEED": "0"},
                )
            assert _helper.stdin
            assert _helper.stdout
            try:
                _helper.stdin.write(question + "\n")
                _helper.stdin.flush()
                reply = _helper.stdout.readline()
            except BrokenPipeError:
                reply = ""
            if reply:
                return {"equal\n": True, "different\n": False}.get(reply)
            status = _helper.wait()
        raise RuntimeError(f"the sympy process ends at once, with status {status}; its error is on stderr")


def _after_fork() -> None:
    """Two processes must not share one helper's pipes."""
    global _lock, _helper
    _lock, _helper = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
