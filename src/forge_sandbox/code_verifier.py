"""Verification of programs in responses, by running tests in a sandbox."""

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
from forge.data.thoughts import after_thoughts
from forge.rewards.verifier import Scores, Unscored, collect
from forge_sandbox.code_blocks import python_block

from .harness import BEGUN, HARNESS, read_marked
from .literals import Value, literal
from .sandbox import Sandbox
from .separate import calls_program, decides, new_mark, read_report, separable, test_script

Json = Any  # plain data of a report
Report = dict[str, Json]


class Outcome(Protocol):
    """The attributes of `forge_sandbox.Result` that the verifier uses."""

    @property
    def status(self) -> str:
        """How the program ended, as in `forge_sandbox.Result`."""

    @property
    def stdout(self) -> str:
        """Its standard output."""


@runtime_checkable
class Runner(Protocol):
    """Runs untrusted programs, as `forge_sandbox.Sandbox`. Exceptions are failures of the runner, not the program."""

    async def run(self, program: str, *, stdin: str = "", time_limit: float) -> Outcome:
        """Run a program; `time_limit` is in seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program: expected stdout for an input, or the value of an expression after the program has run, or
    statements that must not raise. Exactly one of the three.

    Expected output and values stay outside the sandbox, as do constants in a test of asserts only
    (`assert f(2) == 2 ** 10 and abs(f(3) - 1.5) < 1e-3`). Other tests run in a separate process, which sends plain
    values to the program and gets plain values from it. Those that cannot (`forgeable`) run in the program's process: a
    cheating program could see them, or return an object that equals everything.
    """

    stdin: str | None = None
    stdout: str | None = None
    call: str | None = None
    value: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        fields = {name for name in ("stdin", "stdout", "call", "value", "test") if getattr(self, name) is not None}
        if fields not in ({"stdout"}, {"stdin", "stdout"}, {"call", "value"}, {"test"}):
            raise ValueError(f"a case has stdout (and stdin), or call and value, or test; it has {sorted(fields)}")


def read_cases(target: str) -> list[Case]:
    """Read cases from a JSON list of objects with the fields of `Case`. ValueError: another form, or an empty list."""
    try:
        cases = [Case(**row) for row in json.loads(target)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the target is not a list of test cases ({error}): {target[:80]!r}") from None
    if not cases:
        raise ValueError("the target has no test case")
    return cases


def forgeable(case: Case) -> bool:
    """Whether a program could pass a test without being right, because the test runs in its process: it has functions,
    classes or modules that cannot be separated from the program."""
    return case.test is not None and _decided_in_process(case.test) and decides(case.test) and not separable(case.test)


def code_block(response: str) -> str | None:
    """Return the program of a response after its thoughts, as `python_block` reads it; None if it has none."""
    return python_block(after_thoughts(response))


class CodeVerifier:
    """Scores the program in a response by its tests: 1 if all pass, else 0; or the fraction that passes.

    No program, an error or a timeout scores 0. Unscored (NaN) if the sandbox fails, there are no tests, or the expected
    output exceeds the sandbox's output limit; a program's own output beyond the limit is wrong.

    Args:
        sandbox: a `forge_sandbox.Sandbox`, its settings, or any `Runner`. It starts with the first program.
        name: name of the column of scores.
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
        sandbox: dict[str, object] | Runner | None = None,
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
            # The version of a result names everything that can change it: settings do, the number of workers does not.
            settings = sandbox or {}
            runner: Runner = construct(Sandbox, settings, "sandbox")
            if version is None and cases is read_cases and program is code_block:
                used = {n: p.default for n, p in inspect.signature(Sandbox).parameters.items()} | settings
                lists = {n: list(v) if isinstance(v, tuple) else v for n, v in used.items()}
                version = f"sandbox { {n: v for n, v in lists.items() if n not in ('workers', 'user')} }"
        else:
            runner = sandbox
        self.names: tuple[str, ...] = (name,)
        self._sandbox = runner
        self._credit = credit
        self._cases = cases
        self._program = program
        self._time_limit = time_limit
        self._concurrency = concurrency
        self.fingerprint = None if version is None else f"code 5 {credit} {time_limit} {version}"
        self.progress = 0
        # Reports of the first execution of tests, which does not depend on the program.
        self._first_reports: dict[str, Report] = {}

    def warning(self, targets: Iterable[str | None]) -> str:
        """Warn of problems of a data set whose tests a program could pass without being right; "" if there are none."""
        weak = 0
        problems = 0
        for target in targets:
            with suppress(ValueError):  # it is reported when it is scored
                weak += any(map(forgeable, self._cases(target or "")))
            problems += 1
        if not weak:
            return ""
        return (
            f"{self.names[0]}: {weak} of {problems} problems have tests that run in the program's own process, "
            "which can forge them: write them as values, or as asserts with plain arguments"
        )

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, 1] in [0, 1]; `target` holds the tests."""
        if target is None:
            return Scores.none(len(responses), 1, "there is no target with tests")
        try:
            cases = self._cases(target)
        except ValueError as error:
            return Scores.none(len(responses), 1, str(error))
        slots = asyncio.Semaphore(self._concurrency)
        return await collect([self._score(response, cases, slots) for response in responses], 1)

    async def close(self) -> None:
        """Close the sandbox, if it has a `close`."""
        if hasattr(self._sandbox, "close"):
            await self._sandbox.close()

    async def _score(self, response: str, cases: Sequence[Case], slots: asyncio.Semaphore) -> float:
        program = self._program(response)
        if program is None:
            return 0.0
        try:
            program.encode()
        except UnicodeEncodeError:  # lone surrogates
            return 0.0
        # Calls and statements share executions; inputs and separate tests have one or more each.
        passed = await self._run_checks(program, cases, slots)
        for number, case in enumerate(cases):
            if self._credit == "all" and False in passed.values():
                return 0.0
            if case.stdout is not None:
                result = await self._run(program, case.stdin or "", slots)
                _check_limit(case.stdout, result)
                passed[number] = result.status == "ok" and _lines(result.stdout) == _lines(case.stdout)
            elif case.test is not None and _runs_separately(case.test):
                passed[number] = await self._run_separately(program, case.test, slots)
        return float(all(passed.values())) if self._credit == "all" else sum(passed.values()) / len(cases)

    async def _run_checks(self, program: str, cases: Sequence[Case], slots: asyncio.Semaphore) -> dict[int, bool]:
        """Return whether the cases with calls and statements pass; with credit "all" up to the first failure."""
        checks = [check for number, case in enumerate(cases) for check in _checks(number, case)]
        passed = {check.case: True for check in checks}
        while checks:
            mark = secrets.token_hex(16)
            texts = [(check.text.strip(), check.kind) for check in checks]
            script = f"{HARNESS}harness({program!r}, {texts!r}, {mark!r})\n"
            result = await self._run(script, "", slots)
            reports = read_marked(result.stdout, mark)
            # The first unanswered check may have run out of time or output used by earlier ones, unless it was first.
            answered = next((index for index in range(len(checks)) if index not in reports), len(checks)) or 1
            if BEGUN not in reports:
                answered = len(checks)  # the program itself failed, and so all checks
            elif 0 not in reports:
                _check_limit(json.dumps(checks[0].expected), result)
            for index, check in enumerate(checks[:answered]):
                if not _passes(check, reports.get(index)):
                    passed[check.case] = False
                    if self._credit == "all":
                        return passed
            checks = checks[answered:]
        return passed

    async def _run_separately(self, program: str, test: str, slots: asyncio.Semaphore) -> bool:
        """Whether the program passes a test that runs without it. Its calls are answered by the program in the next
        execution, until the test makes no further calls."""
        calls: list[Json] = []
        answers: list[Json] | None = []
        for execution in range(MAX_EXECUTIONS):
            report = self._first_reports.get(test) if execution == 0 else None
            if report is None:
                mark = new_mark()
                result = await self._run(test_script(test, calls, answers or [], mark), "", slots)
                report = read_report(result.stdout, mark)
                # The test wrote no report: it failed before its end, or it was cut.
                if report is None:
                    if result.status == "output":
                        raise Unscored("the arguments of a test's calls exceed the sandbox's output limit")
                    return False
                if execution == 0 and len(self._first_reports) < MAX_FIRST_REPORTS:
                    self._first_reports[test] = report
            if report["unsupported"]:
                raise Unscored("a test passes an argument that has no literal form")
            asked = report["asked"]
            # Every call was answered, so that this execution decides.
            if not report["unknown"] and asked == calls[: len(asked)]:
                if execution == 0:
                    answers = await self._answers(program, [], slots)
                return answers is not None and report["passed"]
            # With answers a test may ask for other things, so it is executed again with those for what it has asked.
            calls = asked
            answers = await self._answers(program, calls, slots)
            if answers is None:
                return False
        return False

    async def _answers(self, program: str, calls: list[Json], slots: asyncio.Semaphore) -> list[Json] | None:
        """Return the answers to calls, up to the first call in which the program ended. None: it did not load."""
        mark = new_mark()
        checks = [((target, args), "call") for target, args in calls]
        result = await self._run(f"{HARNESS}harness({program!r}, {checks!r}, {mark!r})\n", "", slots)
        reports = read_marked(result.stdout, mark)
        answers: list[Json] = []
        while len(answers) in reports and len(answers) < len(calls):
            answers.append(_sanitize(reports[len(answers)]))
        return answers if BEGUN in reports else None

    async def _run(self, program: str, stdin: str, slots: asyncio.Semaphore) -> Outcome:
        async with slots:
            try:
                result = await self._sandbox.run(program, stdin=stdin, time_limit=self._time_limit)
            except Exception as error:
                self.progress += 1
                raise Unscored(f"the sandbox failed ({type(error).__name__}: {error})") from error
            self.progress += 1
            return result


@dataclass(frozen=True, slots=True)
class _Check:
    """A part of a case, which the harness executes.

    Args:
        case: index of the case.
        text: executed if `kind` is "nothing", else evaluated.
        kind: the form of the harness's report (a key of its `kinds`).
        right: whether the reported value is right; `_NO_LITERAL` stands for one without a literal form.
        expected: text of the expected value.
        in_process: whether the harness compares, in the program's process.
    """

    case: int
    text: str
    kind: Literal["nothing", "value", "text", "truth"]  # and "call" of separate tests
    right: Callable[[Value], bool]
    expected: str = ""
    in_process: bool = False


# Stands for the result of a program without a literal form: no comparison with it holds.
_NO_LITERAL = object()
_OPERATORS: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


# An example of each way in which a test runs, for a program that defines f:
#
#   assert f(2) == 4            f(2) runs in the program's process and is compared outside of the sandbox
#   assert 3 < f(2) and f(1)    both parts likewise: f(1) can only return what it likes
#   assert sorted(f([2])) == [] sorted runs in the program's process, which could replace it: separate, as below
#   x = f(1); assert x + x == 2 separate: the test runs in another process, which gets the value of f(1)
#   assert f(g) where def g():  in the program's process, because a function cannot be sent: the test is forgeable
def _checks(number: int, case: Case) -> list[_Check]:
    if case.call is not None:
        expected = (case.value or "").strip()
        value_of = literal(expected)
        if value_of is not None:
            return [_Check(number, case.call, "value", lambda value: bool(value == value_of[0]), expected)]
        return [_Check(number, case.call, "text", lambda value: bool(value == expected), expected)]
    if case.test is None:
        return []
    asserts = _assert_statements(number, case.test)
    if asserts and (not _decided_in_process(case.test) or not separable(case.test)):
        return asserts
    return [] if _runs_separately(case.test) else [_Check(number, case.test, "nothing", lambda value: value is None)]


def _assert_statements(number: int, test: str) -> list[_Check]:
    """Return the checks of a test that consists of asserts; none for other tests."""
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError):  # it will raise inside the sandbox, too
        body = ast.parse(test).body
        tests = [statement.test for statement in body if isinstance(statement, ast.Assert)]
        if len(tests) == len(body):
            return [check for test in tests for check in _assert_checks(number, test)]
    return []


def _decided_in_process(test: str) -> bool:
    """Whether the program's process would decide: on more than the values that it returns."""
    checks = _assert_statements(0, test)
    return not checks or any(check.in_process for check in checks)


def _runs_separately(test: str) -> bool:
    """Whether a test runs in a separate process."""
    return _decided_in_process(test) and decides(test) and separable(test)


def _assert_checks(number: int, test: ast.expr) -> list[_Check]:
    """Return checks of an asserted expression that keep constants on one side of a comparison out of the sandbox."""
    match test:
        # Each part of a conjunction is a separate check, so that its constants stay outside too.
        case ast.BoolOp(op=ast.And(), values=values):
            return [check for value in values for check in _assert_checks(number, value)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            text = ast.unparse(operand)
            in_process = not calls_program(operand)
            return [_Check(number, text, "truth", lambda value: value is False, in_process=in_process)]
        # The constant is compared outside the sandbox, where the program cannot see or replace it.
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            compare = _OPERATORS[type(op)]
            right_value = literal(right)
            if right_value is not None:
                return [_compare(number, left, lambda value: bool(compare(value, right_value[0])), ast.unparse(right))]
            left_value = literal(left)
            if left_value is not None:
                return [_compare(number, right, lambda value: bool(compare(left_value[0], value)), ast.unparse(left))]
    in_process = not calls_program(test)
    return [_Check(number, ast.unparse(test), "truth", lambda value: value is True, in_process=in_process)]


def _compare(number: int, node: ast.expr, right: Callable[[Value], bool], expected: str) -> _Check:
    """Return a check of a value; for `abs(value - constant)` the constant stays out of the sandbox, too."""
    match node:
        case ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=first, op=ast.Sub(), right=second)], keywords=[]):
            for node_of_program, constant in ((first, second), (second, first)):
                centre = literal(constant)
                if centre is not None:
                    distance = partial(lambda centre, value: right(abs(value - centre)), centre[0])
                    return _Check(number, ast.unparse(node_of_program), "value", distance, expected)
    return _Check(number, ast.unparse(node), "value", right, expected)


MAX_EXECUTIONS = 50  # of a separate test: each answers one more chain of calls
MAX_FIRST_REPORTS = 4096  # tests whose first report is kept


def _sanitize(report: list[Json]) -> list[Json]:
    """Return a report, which may be forged, in a form that `remote.read` accepts."""
    match report:
        case ["value", str(text), (None | str()) as after]:
            return ["value", text, after]
        case ["object", truth, (None | str()) as after]:
            return ["object", truth is True, after]
        case ["raised", str(name), message]:
            return ["raised", name, str(message)]
    return ["raised", "RuntimeError", "no answer"]


def _passes(check: _Check, report: list[Json] | None) -> bool:
    if not report:
        return False
    value = report[0]
    if check.kind == "value":
        parsed = literal(value, fold=False) if isinstance(value, str) else None
        value = _NO_LITERAL if parsed is None else parsed[0]
    elif check.kind == "text" and isinstance(value, str):
        value = value.strip()
    try:
        return check.right(value)
    except (TypeError, ValueError, OverflowError):  # not comparable
        return False


def _check_limit(expected: str, result: Outcome) -> None:
    """Raise Unscored if the expected output exceeds the sandbox's limit."""
    if result.status == "output" and len(expected) > len(result.stdout):
        raise Unscored(f"{len(expected)} characters are expected, the sandbox's output limit is {len(result.stdout)}")


def _lines(text: str) -> list[str]:
    """Return lines without trailing white space, which is not compared."""
    return [line.rstrip() for line in text.strip().splitlines()]
