"""Small programs on lists of numbers: a description, and test cases that a right program passes.

A program has one step for each word of its description, and works on `x`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from apps.toys.tasks import ProceduralTask, Row


class Operation(NamedTuple):
    """A word, the line of Python that does it, and one that looks like it and does not."""

    apply: Callable[[list[int]], list[int]]
    right: str
    wrong: str


OPERATIONS: dict[str, Operation] = {
    "sort": Operation(sorted, "x=sorted(x)", "x=sorted(x)[::-1]"),
    "falling": Operation(lambda x: sorted(x, reverse=True), "x=sorted(x)[::-1]", "x=x[::-1]"),
    "reverse": Operation(lambda x: x[::-1], "x=x[::-1]", "x=x[:-1]"),
    "double": Operation(lambda x: [2 * v for v in x], "x=[2*v for v in x]", "x=2*x"),
    "square": Operation(lambda x: [v * v for v in x], "x=[v*v for v in x]", "x=[v+v for v in x]"),
    "negate": Operation(lambda x: [-v for v in x], "x=[-v for v in x]", "x=[~v for v in x]"),
    "next": Operation(lambda x: [v + 1 for v in x], "x=[v+1 for v in x]", "x=x+[1]"),
    "even": Operation(lambda x: [v for v in x if v % 2 == 0], "x=[v for v in x if v%2==0]", "x=[v for v in x if v%2]"),
    "odd": Operation(lambda x: [v for v in x if v % 2], "x=[v for v in x if v%2]", "x=x[1::2]"),
    "rise": Operation(lambda x: [v for v in x if v > 0], "x=[v for v in x if v>0]", "x=[v for v in x if v>1]"),
    "head": Operation(lambda x: x[:3], "x=x[:3]", "x=x[3:]"),
    "tail": Operation(lambda x: x[-2:], "x=x[-2:]", "x=x[:-2]"),
    "drop": Operation(lambda x: x[1:], "x=x[1:]", "x=x[:1]"),
    "once": Operation(lambda x: list(dict.fromkeys(x)), "x=list(dict.fromkeys(x))", "x=list(set(x))"),
    "sums": Operation(
        lambda x: [sum(x[: i + 1]) for i in range(len(x))],
        "x=[sum(x[:i+1]) for i in range(len(x))]",
        "x=[sum(x[:i]) for i in range(len(x))]",
    ),
}
_CASES = 4


class Program(ProceduralTask):
    """`low` to `high` steps such as "sort,double,head", and test cases as JSON for `forge_sandbox.read_cases`.

    ValueError: more steps than there are words, as every step has another word.
    """

    name = "program"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        if low > len(OPERATIONS):
            raise ValueError(f"difficulty of task 'program': it has at most {len(OPERATIONS)} steps, not {low}")
        words = rng.sample(sorted(OPERATIONS), rng.randint(low, min(high, len(OPERATIONS))))
        return Row(",".join(words), json.dumps(cases(words, rng)))

    def size(self, low: int, high: int) -> int:
        return sum(math.perm(len(OPERATIONS), steps) for steps in range(low, min(high, len(OPERATIONS)) + 1))


def cases(words: list[str], rng: Random) -> list[dict[str, Any]]:
    """Calls of `f` with the values that they should have."""
    made = []
    for _ in range(_CASES):
        numbers = value = [rng.randint(-9, 9) for _ in range(rng.randint(5, 9))]
        for word in words:
            value = OPERATIONS[word].apply(value)
        made.append({"call": f"f({numbers})", "value": repr(value)})
    return made


def function(body: str) -> str:
    """The program whose steps are `body`: a function f(x)."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"def f(x):\n{lines}    return x\n"
