"""Equality of two final answers: the same text, letter or number, and otherwise what math-verify says.

An extension may compare in another way: the entry point of the group `forge.answers` names a module with the functions
`are_equal`, `parse_number`, `split_choice` and `same_text`, as this module has them.
"""

import json
import os
import re
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any

_LOOP = Path(__file__).with_name("helper_process.py")


class Helper:
    """Helper process that compares answers within a limit of CPU time.

    Rewards run in threads, where timeouts by signals do not work, and no signal interrupts one huge integer power. So
    each process starts one helper process for a program (see `helper_process`), which loads it once and forks a child
    for every question. The helper process ends with its owner, when its stdin closes.

    Args:
        program: a file that defines `are_equal(*question) -> bool`, and `prepare_question(line)`, which loads what a
            question needs.
    """

    def __init__(self, program: Path) -> None:
        self._program = program
        self._after_fork()
        # Two processes must not share the pipes of one helper.
        os.register_at_fork(after_in_child=self._after_fork)
        self._cached_judge = lru_cache(maxsize=4096)(self._judge)  # degenerate policies repeat themselves
        self._cached_ask = lru_cache(maxsize=1024)(self._ask)  # for targets, which recur with every response

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def verdict(self, question: list[Any], of_itself: list[Any]) -> bool | None:
        """Return whether an answer equals its target; None if the target takes too much CPU time even compared with
        itself.

        Args:
            question: the arguments of the program's `are_equal`.
            of_itself: the same with the target also as the answer.

        Raises:
            RuntimeError: the helper process does not run.
        """
        return self._cached_judge(json.dumps(question), json.dumps(of_itself))

    def _judge(self, question: str, of_itself: str) -> bool | None:
        verdict = self._ask(question)
        # If the target is fast by itself, the answer is what is slow. It counts as wrong, or a policy could avoid wrong
        # answers by slow ones.
        is_slow_answer = verdict is None and self._cached_ask(of_itself) is not None
        return False if is_slow_answer else verdict

    def _ask(self, question: str) -> bool | None:
        """Return the helper process's verdict on a question in JSON; None if it takes too much CPU time."""
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

                assert self.process.stdin and self.process.stdout
                try:
                    self.process.stdin.write(question + "\n")
                    self.process.stdin.flush()
                    reply = self.process.stdout.readline()
                except BrokenPipeError:
                    reply = ""

                if reply:
                    return {"equal\n": True, "different\n": False}.get(reply)
                status = self.process.wait()

            raise RuntimeError(f"{self._program.name} exits immediately with status {status}; its error is on stderr")


TOLERANCE = 1e-6  # of two numbers, as of `MathReward`
LONGEST = 2000  # maximum number of characters of an answer that is compared
_helper = Helper(Path(__file__).with_name("verify_process.py"))
_CHOICE = re.compile(
    r"\s*(?:option|choice|answer)?\s*(?:\\text\{)?(?:\(([A-Za-z])\)|([A-Za-z])(?=\s*\}?\s*\Z|[).:](?:\s|\Z)))",
    re.IGNORECASE,
)
_MARKS = re.compile(r"\\(?:left|right|,|!|;|:|displaystyle)(?![A-Za-z])|[$\s]|\{,\}|\.\Z")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_UNIT = re.compile(r"(?<=\d)(?:\s*\\text\{[^{}]*\}|\s[A-Za-z°²³ ]+|\s?°[CF]?|\^\\circ)[.\s]*\Z")
_NUMBER = re.compile(
    r"(?P<numerator>[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,3})?)"
    r"(?:/(?P<denominator>\d+))?(?P<percent>\\?%)?"
)


@lru_cache(maxsize=1)
def load_comparison() -> Any:
    """Return the module that compares answers: an extension's if one is installed, else this one."""
    for point in entry_points(group="forge.answers"):
        return point.load()
    return sys.modules[__name__]


def first_equal(answer: str, others: Iterable[str]) -> str:
    """Return the first of several answers that equals the given answer, or the given answer if none does. Only the
    first 32 are compared, as a symbolic comparison may take most of a second.

    >>> first_equal("1/2", ["3", "0.5"])
    '0.5'
    """
    return next(
        (other for other in islice(others, 32) if load_comparison().are_equal(answer, other, TOLERANCE)), answer
    )


def same_text(one: str, other: str) -> bool:
    """Return whether two texts are the same apart from white space and markup, and not empty.

    >>> same_text("x = 3", "x=3")
    True
    """
    return _strip_markup(one) == _strip_markup(other) != ""


def split_choice(text: str) -> tuple[str, str]:
    """Return the letter of a labelled choice, such as "(B)", "B) 12" or "option B", and the text after it; ("", "") for
    any other text.

    >>> split_choice("(B) 12")
    ('B', '12')
    """
    label = _CHOICE.match(text)
    return ("", "") if label is None else (label[1] or label[2], text[label.end() :].lstrip(").: "))


def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """Return the value of a text that consists of one number, and whether it is a percentage; None for any other text.
    A unit after the number is ignored.

    >>> parse_number("1/4")
    (Fraction(1, 4), False)
    """
    without_markup = _strip_markup(_UNIT.sub("", text[:LONGEST]))
    plain = _FRACTION.sub(r"\1/\2", without_markup).lstrip("€£¥\\")
    match = _NUMBER.fullmatch(plain.rpartition("=")[2])
    if match is None or not any(map(str.isdigit, match["numerator"])) or match["denominator"] == "0":
        return None
    value = Fraction(match["numerator"].replace(",", "")) / int(match["denominator"] or 1)
    return value, match["percent"] is not None


def are_equal(answer: str, target: str, tolerance: float) -> bool | None:
    """Return whether two answers are equal; None if the target takes too long to compare.

    Numbers are equal if they differ by at most `tolerance`, which is relative to targets between -1 and 1 and absolute
    otherwise. A percentage, such as 50 %, equals both 50 and 0.5.
    """
    if same_text(answer, target):
        return True
    if not answer.strip() or not target.strip() or max(len(answer), len(target)) > LONGEST:
        return False

    label, target_label = split_choice(answer)[0], split_choice(target)[0]
    if label and target_label:
        return label == target_label

    parsed_answer, parsed_target = parse_number(answer), parse_number(target)
    if parsed_answer is None or parsed_target is None:
        return _helper.verdict([answer, target], [target, target])

    return are_close(parsed_answer, parsed_target, tolerance)


def are_close(answer: tuple[Fraction, bool], target: tuple[Fraction, bool], tolerance: float) -> bool:
    """Return whether two numbers, each with whether it is a percentage, are equal as `are_equal` says.

    >>> are_close((Fraction(50), True), (Fraction(1, 2), False), 0.0)
    True
    """
    # If only one of the two is a percentage, compare both its figure and its value.
    (value, is_percent), (expected, is_target_percent) = answer, target
    pairs = [(value, expected)]
    if is_percent is not is_target_percent:
        pairs.append((value / 100, expected) if is_percent else (value, expected / 100))
    margin = Fraction(str(tolerance))
    return any(abs(a - b) <= margin * min(Fraction(1), abs(b)) for a, b in pairs)


def _strip_markup(text: str) -> str:
    return _MARKS.sub("", unicodedata.normalize("NFKC", text).replace("−", "-").strip())
