"""Small functions as libraries have them, the inputs that test them, and the bugs that one wrong word makes in them.

In the sources `$a`, `$b` and `$c` stand for names, which vary.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

WORD = re.compile(r"\$[abc]|\w+|[<>=!]=|//|\*\*|[-+*/%<>]")
# A bug is one of these in the place of another of its row.
ROWS = (
    ("<", "<=", ">", ">=", "==", "!="),
    ("+", "-", "*", "/", "//", "%"),
    ("0", "1", "2", "3", "4", "5", "9"),
    ("min", "max", "sum", "len"),
    ("all", "any"),
    ("$a", "$b", "$c"),
)
MOST_LINES = 60  # that a function runs on one input: products in an endless loop soon fill the memory


class Bug(NamedTuple):
    """A line, counted from 1, in which `right` was replaced by `wrong`, and its text."""

    line: int
    right: str
    wrong: str
    text: str


@dataclass(frozen=True, eq=False)
class Function:
    """A correct function with its inputs, each a list of arguments."""

    source: str
    inputs: tuple[list[Any], ...]

    @property
    def name(self) -> str:
        """The name that it is defined by."""
        return self.source[4 : self.source.index("(")]

    def broken(self, bug: Bug) -> str:
        """The source with a bug."""
        lines = self.source.splitlines()
        lines[bug.line - 1] = bug.text
        return "\n".join(lines)


@cache
def bugs_of(function: Function) -> tuple[Bug, ...]:
    """All bugs of one word that the inputs show, and that sed repairs, which replaces the first such word of a line."""
    right = results(function, function.source)
    return tuple(bug for bug in replacements(function) if results(function, function.broken(bug)) not in ([], right))


def replacements(function: Function) -> Iterator[Bug]:
    """All words of a function but those of its first line, each with another of its row in its place."""
    for number, line in enumerate(function.source.splitlines()[1:], 2):
        for match in WORD.finditer(line):
            row = next((row for row in ROWS if match[0] in row), ())
            for word in row:
                text = f"{line[: match.start()]}{word}{line[match.end() :]}"
                is_used = not word.startswith("$") or word in function.source
                if is_used and word != match[0] and text.replace(word, match[0], 1) == line:
                    yield Bug(number, match[0], word, text)


def results(function: Function, source: str) -> list[str]:
    """The results of a variant for each input, or the error that it raises; nothing for invalid syntax."""
    scope: dict[str, Any] = {}
    try:
        exec(compile(named(source, "bcj"), function.name, "exec"), scope)
    except SyntaxError:
        return []
    return [outcome(scope[function.name], arguments, function.name) for arguments in function.inputs]


def outcome(call: Callable[..., Any], arguments: list[Any], file: str) -> str:
    """The result of a call, or the error that it raises; it ends after `MOST_LINES` of its file."""
    lines = 0

    def count(frame: FrameType, event: str, value: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != file:
            return None
        lines += 1
        if lines > MOST_LINES:
            raise TimeoutError
        return count

    # Copied by JSON: no result depends on what an earlier call did to them.
    copied = json.loads(json.dumps(arguments))
    trace = sys.gettrace()
    sys.settrace(count)
    try:
        return repr(call(*copied))
    except Exception as error:
        return type(error).__name__
    finally:
        sys.settrace(trace)


def named(text: str, names: str) -> str:
    """A text with names for its arguments."""
    for place, name in zip(("$a", "$b", "$c"), names, strict=True):
        text = text.replace(place, name)
    return text


def function(source: str, *inputs: list[Any]) -> Function:
    """A function of the table below."""
    return Function(source.strip("\n"), inputs)


FUNCTIONS = (
    function(
        """
def clamp($a, $b, $c):
    if $a < $b:
        return $b
    if $a > $c:
        return $c
    return $a
""",
        *([1, 2, 5], [3, 2, 5], [9, 2, 5], [2, 2, 5]),
    ),
    function(
        """
def gcd($a, $b):
    while $b:
        $a, $b = $b, $a % $b
    return $a
""",
        *([12, 18], [7, 5], [0, 4], [9, 3]),
    ),
    function(
        """
def is_leap($a):
    if $a % 100 == 0:
        return $a % 400 == 0
    return $a % 4 == 0
""",
        *([2000], [1900], [2024], [2023], [2022], [2100]),
    ),
    function(
        """
def chunks($a, $b):
    ends = range(0, len($a), $b)
    return [$a[i:i + $b] for i in ends]
""",
        *([[1, 2, 3, 4, 5], 2], [[1, 2, 3], 3], [[4, 5, 6, 7], 1]),
    ),
    function(
        """
def rotate($a, $b):
    head = $a[:$b]
    tail = $a[$b:]
    return tail + head
""",
        *([[1, 2, 3, 4], 1], [[1, 2, 3, 4], 3], [[5, 6, 7], 2]),
    ),
    function(
        """
def parity($a):
    odd = [d for d in $a if d % 2 == 1]
    return len(odd)
""",
        *([[1, 2, 3]], [[2, 4]], [[5, 7, 9, 11]], [[]]),
    ),
    function(
        """
def roman($a):
    if $a == 4:
        return "IV"
    if $a == 9:
        return "IX"
    return "V" * ($a // 5) + "I" * ($a % 5)
""",
        *([1], [3], [4], [5], [8], [9]),
    ),
    function(
        """
def sign($a):
    if $a > 0:
        return 1
    return -1 if $a < 0 else 0
""",
        *([5], [0], [-3], [1], [-1]),
    ),
    function(
        """
def factorial($a):
    $b = 1
    for i in range(1, $a + 1):
        $b = $b * i
    return $b
""",
        *([0], [1], [4], [5]),
    ),
    function(
        """
def fib($a):
    $b, $c = 0, 1
    for i in range($a):
        $b, $c = $c, $b + $c
    return $b
""",
        *([0], [1], [2], [6], [9]),
    ),
    function(
        """
def is_sorted($a):
    pairs = zip($a, $a[1:])
    return all(d <= e for d, e in pairs)
""",
        *([[1, 2, 2]], [[3, 1]], [[1, 3, 2]], [[]], [[4, 4, 4]]),
    ),
    function(
        """
def mean($a):
    if not $a:
        return 0
    return sum($a) / len($a)
""",
        *([[1, 2, 6]], [[]], [[4]], [[2, 3]]),
    ),
    function(
        """
def span($a):
    low = min($a)
    high = max($a)
    return high - low
""",
        *([[3, 1, 8]], [[5]], [[2, -4]], [[7, 9]]),
    ),
    function(
        """
def median($a):
    $b = sorted($a)
    return $b[len($b) // 2]
""",
        *([[3, 1, 2]], [[9, 4, 7, 1, 2]], [[6]], [[2, 3, 1, 5, 4, 7, 6]]),
    ),
    function(
        """
def area($a, $b, $c):
    p = ($a + $b + $c) / 2
    return (p * (p - $a) * (p - $b) * (p - $c)) ** 0.5
""",
        *([3, 4, 5], [5, 5, 6], [5, 12, 13]),
    ),
    function(
        """
def dot($a, $b):
    $c = 0
    for d, e in zip($a, $b):
        $c += d * e
    return $c
""",
        *([[1, 2], [3, 4]], [[], []], [[2, 0, 1], [5, 6, 7]]),
    ),
    function(
        """
def percent($a, $b):
    if $b == 0:
        return 0
    return 100 * $a / $b
""",
        *([1, 4], [3, 0], [2, 5], [7, 7]),
    ),
    function(
        """
def digits($a):
    $b = 0
    while $a > 0:
        $b += $a % 10
        $a //= 10
    return $b
""",
        *([0], [7], [123], [9041]),
    ),
)
