"""Verify programs in responses by running tests in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import operator
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from forge.config.plugin import construct
from forge.data.code_blocks import python_block
from forge.data.thoughts import after_thoughts
from forge.rewards.verifier import Scores, Unscored, collect

from .harness import BEGUN, HARNESS, read_marked
from .literals import literal
from .sandbox import Sandbox
from .separate import judges, new_mark, of_program, report, script, separable


class Ended(Protocol):
    """The part of `forge_sandbox.Result` used here."""

    @property
    def status(self) -> str:
        """How the program ended, as of `forge_sandbox.Result`."""

    @property
    def stdout(self) -> str:
        """Its standard output."""


@runtime_checkable
class Runner(Protocol):
    """Runs untrusted programs, as `forge_sandbox.Sandbox`. Exceptions are failures of the runner, not the program."""

    async def run(self, program: str, *, stdin: str = "", time_limit: float) -> Ended:
        """Run a program; `time_limit` in seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program: expected stdout for an input, or the value of an expression after the program has run, or
    statements that must not raise. Exactly one of the three.

    Expected output and values stay outside the sandbox, as do constants in a test of asserts only
    (`assert f(2) == 2 ** 10 and abs(f(3) - 1.5) < 1e-3`). Other tests run in a process of their own, which sends plain
    values to the program and gets plain values from it. Those that cannot (`forgeable`) run in the program's process: a
    cheating program could see them, or return an object that equals everything.
    """

    stdin: str | None = None
    stdout: str | None = None
    call: str | None = None
    value: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        given = {name for name in ("stdin", "stdout", "call", "value", "test") if getattr(self, name) is not None}
        if given not in ({"stdout"}, {"stdin", "stdout"}, {"call", "value"}, {"test"}):
            raise ValueError(f"a case has stdout (and stdin), or call and value, or test; it has {sorted(given)}")


def read_cases(target: str) -> list[Case]:
    """Cases from a JSON list of objects with the fields of `Case`. ValueError: another form, or an empty list."""
    try:
        cases = [Case(**row) for row in json.loads(target)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the target is not a list of test cases ({error}): {target[:80]!r}") from None
    if not cases:
        raise ValueError("the target has no test case")
    return cases


def forgeable(case: Case) -> bool:
    """Whether a program could pass a test without being right: the test runs in its process. It has functions, classes
    or modules that cannot be separated from the program."""
    return case.test is not None and _inside(case.test) and judges(case.test) and not separable(case.test)


def code_block(response: str) -> str | None:
    """The program of a response after its thoughts, as `python_block` reads it; None if it has none."""
    return python_block(after_thoughts(response))


class CodeVerifier:
    """Scores the program in a response by its tests: 1 if all pass, else 0; or the fraction that passes.

    No program, an error or a timeout scores 0. Unscored (NaN) if the sandbox fails, there are no tests, or the expected
    output exceeds the sandbox's output limit; a program's own output beyond the limit is wrong.

    Args:
        sandbox: a `forge_sandbox.Sandbox`, its settings, or any `Runner`. It starts with the first program.
        name: of the column.
        credit: "all" or "share".
        cases: parses tests from the target of a call.
        program: extracts the program from a response, None for none.
        time_limit: seconds per execution: of a case with input, or of all calls and statements together. Those left
            unanswered at a time or output limit are executed again; one fails only if it was first and unanswered.
        concurrency: maximum concurrent executions per call.
        version: cache key; change it when the sandbox, `cases` or `program` behave differently. Without it results are
            not cached, unless `sandbox` is given by settings and the parsers are the default ones.

    Attributes:
        progress: number of executions that ended or failed, not counting cancelled ones.

    Raises:
        ValueError: an invalid setting.
    """

    def __init__(
        self,
        sandbox: dict[str, Any] | Runner | None = None,
        name: str = "code",
        *,
        credit: Literal["all", "share"] = "all",
        cases: Callable[[str], Sequence[Case]] = read_cases,
        program: Callable[[str], str | None] = code_block,
        time_limit: float = 5.0,
        concurrency: int = 4,
        version: str | None = None,
    ) -> None:
        if credit not in ("all", "share"):
            raise ValueError(f"credit must be all or share, got {credit!r}")
        if time_limit <= 0 or concurrency < 1:
            raise ValueError(f"time_limit must be above 0, concurrency at least 1: got {time_limit}, {concurrency}")
        if sandbox is None or isinstance(sandbox, dict):
            settings = sandbox or {}
            runner: Runner = construct(Sandbox, settings, "sandbox")
            if version is None and cases is read_cases and program is code_block:
                decide = {n: p.default for n, p in inspect.signature(Sandbox).parameters.items()} | settings
                lists = {n: list(v) if isinstance(v, tuple) else v for n, v in decide.items()}
                version = f"sandbox { {n: v for n, v in lists.items() if n not in ('workers', 'user')} }"
        else:
            runner = sandbox
        self.names: tuple[str, ...] = (name,)
        self._sandbox = runner
        self._credit, self._cases, self._program = credit, cases, program
        self._time_limit, self._concurrency = time_limit, concurrency
        self.fingerprint = None if version is None else f"code 5 {credit} {time_limit} {version}"
        self.progress = 0
        self._first: dict[str, dict[str, Any]] = {}

    def warning(self, targets: Iterable[str | None]) -> str:
        """Of a data set: how many problems have tests that a program could pass without being right; "" if none."""
        weak = known = 0
        for target in targets:
            with suppress(ValueError):  # it is reported when it is scored
                weak += any(map(forgeable, self._cases(target or "")))
            known += 1
        if not weak:
            return ""
        return (
            f"{self.names[0]}: {weak} of {known} problems have tests that run in the program's own process, which can "
            "forge them: write them as values, or as asserts with plain arguments"
        )

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, 1] in [0, 1]; `target` holds the tests."""
        if target is None:
            return Scores.none(len(responses), 1, "there is no target with tests")
        try:
            cases = self._cases(target)
        except ValueError as error:
            return Scores.none(len(responses), 1, str(error))
        turn = asyncio.Semaphore(self._concurrency)
        return await collect([self._passed(response, cases, turn) for response in responses], 1)

    async def close(self) -> None:
        """Close the sandbox, if it has a `close`."""
        if hasattr(self._sandbox, "close"):
            await self._sandbox.close()

    async def _passed(self, response: str, cases: Sequence[Case], turn: asyncio.Semaphore) -> float:
        program = self._program(response)
        if program is None:
            return 0.0
        try:
            program.encode()
        except UnicodeEncodeError:  # lone surrogates
            return 0.0
        right = await self._checked(program, cases, turn)
        for number, case in enumerate(cases):
            if self._credit == "all" and False in right.values():
                return 0.0
            if case.stdout is not None:
                result = await self._run(program, case.stdin or "", turn)
                _fits(case.stdout, result)
                right[number] = result.status == "ok" and _lines(result.stdout) == _lines(case.stdout)
            elif case.test is not None and _apart(case.test):
                right[number] = await self._separate(program, case.test, turn)
        return float(all(right.values())) if self._credit == "all" else sum(right.values()) / len(cases)

    async def _checked(self, program: str, cases: Sequence[Case], turn: asyncio.Semaphore) -> dict[int, bool]:
        """Results of the cases with calls and statements; with credit "all" up to the first failure."""
        checks = [check for number, case in enumerate(cases) for check in _checks(number, case)]
        right = {check.case: True for check in checks}
        while checks:
            mark = secrets.token_hex(16)
            given = [(check.text.strip(), check.kind) for check in checks]
            script = f"{HARNESS}harness({program!r}, {given!r}, {mark!r})\n"
            result = await self._run(script, "", turn)
            reports = read_marked(result.stdout, mark)
            # The first unanswered check may have run out of time or output used by earlier ones, unless it was first.
            done = next((place for place in range(len(checks)) if place not in reports), len(checks)) or 1
            if BEGUN not in reports:
                done = len(checks)
            elif 0 not in reports:
                _fits(json.dumps(checks[0].expected), result)
            for place, check in enumerate(checks[:done]):
                if not _passes(check, reports.get(place)):
                    right[check.case] = False
                    if self._credit == "all":
                        return right
            checks = checks[done:]
        return right

    async def _separate(self, program: str, test: str, turn: asyncio.Semaphore) -> bool:
        """Whether the program passes a test that runs without it. The calls that the test makes are answered by the
        program in the next execution, until the test has made no other calls."""
        calls: list[Any] = []
        answers: list[Any] | None = []
        for number in range(_ROUNDS):
            if number or (found := self._first.get(test)) is None:
                mark = new_mark()
                result = await self._run(script(test, calls, answers or [], mark), "", turn)
                found = report(result.stdout, mark)
                if found is None:
                    if result.status == "output":
                        raise Unscored("the arguments of a test's calls exceed the sandbox's output limit")
                    return False
                if not number and len(self._first) < _REMEMBERED:
                    self._first[test] = found
            if found["unsupported"]:
                raise Unscored("a test passes an argument that has no literal form")
            asked = found["asked"]
            if not found["unknown"] and asked == calls[: len(asked)]:
                if number == 0:
                    answers = await self._answers(program, [], turn)
                return answers is not None and found["passed"]
            calls = asked
            answers = await self._answers(program, calls, turn)
            if answers is None:
                return False
        return False

    async def _answers(self, program: str, calls: list[Any], turn: asyncio.Semaphore) -> list[Any] | None:
        """The answers to the first calls, up to one in which the program ended. None: it did not load."""
        mark = new_mark()
        given = [((target, args), "call") for target, args in calls]
        result = await self._run(f"{HARNESS}harness({program!r}, {given!r}, {mark!r})\n", "", turn)
        reports = read_marked(result.stdout, mark)
        answers: list[Any] = []
        while len(answers) in reports and len(answers) < len(calls):
            answers.append(_answer(reports[len(answers)]))
        return answers if BEGUN in reports else None

    async def _run(self, program: str, stdin: str, turn: asyncio.Semaphore) -> Ended:
        async with turn:
            try:
                result = await self._sandbox.run(program, stdin=stdin, time_limit=self._time_limit)
            except Exception as error:
                self.progress += 1
                raise Unscored(f"the sandbox failed ({type(error).__name__}: {error})") from error
            self.progress += 1
            return result


@dataclass(frozen=True, slots=True)
class _Check:
    """A part of a case.

    Args:
        case: its index.
        text: executed if `kind` is "nothing", else evaluated.
        kind: what the harness reports (a key of its `kinds`).
        right: whether the reported value is right; it is `_OTHER` if it has no literal form.
        expected: text of the expected value.
        decides: the harness compares, in the program's process.
    """

    case: int
    text: str
    kind: Literal["nothing", "value", "text", "truth"]  # and "call" of tests that run elsewhere
    right: Callable[[Any], bool]
    expected: str = ""
    decides: bool = False


_OTHER = object()
_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def _checks(number: int, case: Case) -> list[_Check]:
    if case.call is not None:
        expected = (case.value or "").strip()
        if (known := literal(expected)) is not None:
            return [_Check(number, case.call, "value", lambda value: bool(value == known[0]), expected)]
        return [_Check(number, case.call, "text", lambda value: bool(value == expected), expected)]
    if case.test is None:
        return []
    if (found := _asserted(number, case.test)) and (not _inside(case.test) or not separable(case.test)):
        return found
    return [] if _apart(case.test) else [_Check(number, case.test, "nothing", lambda value: value is None)]


def _asserted(number: int, test: str) -> list[_Check]:
    """Checks of a test that consists of asserts; empty for others."""
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError):  # then it raises inside the sandbox, too
        body = ast.parse(test).body
        tests = [statement.test for statement in body if isinstance(statement, ast.Assert)]
        if len(tests) == len(body):
            return [check for test in tests for check in _assert_checks(number, test)]
    return []


def _inside(test: str) -> bool:
    """Whether the program's process would decide: on more than values that it returns."""
    return not (found := _asserted(0, test)) or any(check.decides for check in found)


def _apart(test: str) -> bool:
    """Whether a test runs in a process of its own."""
    return _inside(test) and judges(test) and separable(test)


def _assert_checks(number: int, test: ast.expr) -> list[_Check]:
    """Checks of an asserted expression, which keep constants on one side of a comparison out of the sandbox."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return [check for value in values for check in _assert_checks(number, value)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            text, decides = ast.unparse(operand), not of_program(operand)
            return [_Check(number, text, "truth", lambda value: value is False, decides=decides)]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            compare = _OPERATORS[type(op)]
            if (known := literal(right)) is not None:
                return [_compared(number, left, lambda value: bool(compare(value, known[0])), ast.unparse(right))]
            if (first := literal(left)) is not None:
                return [_compared(number, right, lambda value: bool(compare(first[0], value)), ast.unparse(left))]
    return [_Check(number, ast.unparse(test), "truth", lambda value: value is True, decides=not of_program(test))]


def _compared(number: int, node: ast.expr, right: Callable[[Any], bool], expected: str) -> _Check:
    """A check of a value; for `abs(value - constant)` the constant stays out of the sandbox, too."""
    match node:
        case ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=one, op=ast.Sub(), right=other)], keywords=[]):
            for value, constant in ((one, other), (other, one)):
                if (known := literal(constant)) is not None:
                    near = partial(lambda centre, value: right(abs(value - centre)), known[0])
                    return _Check(number, ast.unparse(value), "value", near, expected)
    return _Check(number, ast.unparse(node), "value", right, expected)


_ROUNDS = 50  # executions of a test that runs apart
_REMEMBERED = 4096  # tests whose first calls are known


def _answer(report: list[Any]) -> list[Any]:
    """As `remote.read` takes it, from a report that may be forged."""
    match report:
        case ["value", str(text), (None | str()) as after]:
            return ["value", text, after]
        case ["object", truth, (None | str()) as after]:
            return ["object", truth is True, after]
        case ["raised", str(name), message]:
            return ["raised", name, str(message)]
    return ["raised", "RuntimeError", "no answer"]


def _passes(check: _Check, report: list[Any] | None) -> bool:
    if not report:
        return False
    value = report[0]
    if check.kind == "value":
        read = literal(value, fold=False) if isinstance(value, str) else None
        value = _OTHER if read is None else read[0]
    elif check.kind == "text" and isinstance(value, str):
        value = value.strip()
    try:
        return check.right(value)
    except (TypeError, ValueError, OverflowError):  # not comparable
        return False


def _fits(expected: str, result: Ended) -> None:
    """Unscored: the expected output exceeds the sandbox's limit."""
    if result.status == "output" and len(expected) > len(result.stdout):
        raise Unscored(f"{len(expected)} characters are expected, the sandbox's output limit is {len(result.stdout)}")


def _lines(text: str) -> list[str]:
    """Lines without trailing white space, which is not compared."""
    return [line.rstrip() for line in text.strip().splitlines()]
