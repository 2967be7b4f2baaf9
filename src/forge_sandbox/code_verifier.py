"""Verify programs in responses by running tests in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import operator
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from forge.plugin import construct
from forge.verifiers.verifier import Scores, Unscored, collect

from .literals import literal
from .sandbox import Sandbox

_LANGUAGES = ("", "python", "py", "python3")


class Ended(Protocol):
    """The part of `forge_sandbox.Result` used here."""

    @property
    def status(self) -> str: ...

    @property
    def stdout(self) -> str: ...


@runtime_checkable
class Runner(Protocol):
    """Runs untrusted programs, as `forge_sandbox.Sandbox`. Exceptions are failures of the runner, not the program."""

    async def run(self, program: str, *, stdin: str = "", time_limit: float) -> Ended: ...


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program: expected stdout for an input, or the value of an expression after the program has run, or
    statements that must not raise. Exactly one of the three.

    Expected output and values stay outside the sandbox, as do constants in a test of asserts only
    (`assert f(2) == 2 ** 10 and abs(f(3) - 1.5) < 1e-3`). Other comparisons, and tests with other statements, run
    inside it: a cheating program could see them, or return an object that equals everything.
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


def code_block(response: str) -> str | None:
    """The last fenced block in Python or without a language; None if there is none."""
    found: str | None = None
    begin: int | None = None  # of the open block
    at = 0
    for line in response.split("\n"):
        fence = line.strip(" \t")
        if begin is None and fence[:3] == "```" and fence[3:].strip(" \t").lower() in _LANGUAGES:
            begin = at + len(line) + 1
        elif begin is not None and fence[:3] == "```":
            found, begin = response[begin:at], None
        at += len(line) + 1
    return found


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
        self.fingerprint = None if version is None else f"code 3 {credit} {time_limit} {version}"
        self.progress = 0

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
        return float(all(right.values())) if self._credit == "all" else sum(right.values()) / len(cases)

    async def _checked(self, program: str, cases: Sequence[Case], turn: asyncio.Semaphore) -> dict[int, bool]:
        """Results of the cases with calls and statements; with credit "all" up to the first failure."""
        checks = [check for number, case in enumerate(cases) for check in _checks(number, case)]
        right = {check.case: True for check in checks}
        while checks:
            mark = secrets.token_hex(16)
            given = [(check.text.strip(), check.kind) for check in checks]
            script = f"{_HARNESS}harness({program!r}, {given!r}, {mark!r})\n"
            result = await self._run(script, "", turn)
            reports = _read_marked(result.stdout, mark)
            # The first unanswered check may have run out of time or output used by earlier ones, unless it was first.
            done = next((place for place in range(len(checks)) if place not in reports), len(checks)) or 1
            if _BEGUN not in reports:
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
    """

    case: int
    text: str
    kind: Literal["nothing", "value", "text", "truth"]
    right: Callable[[Any], bool]
    expected: str = ""


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
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError):  # then it raises inside the sandbox, too
        body = ast.parse(case.test).body
        tests = [statement.test for statement in body if isinstance(statement, ast.Assert)]
        if tests and len(tests) == len(body):
            return [check for test in tests for check in _assert_checks(number, test)]
    return [_Check(number, case.test, "nothing", lambda value: value is None)]


def _assert_checks(number: int, test: ast.expr) -> list[_Check]:
    """Checks of an asserted expression, which keep constants on one side of a comparison out of the sandbox."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return [check for value in values for check in _assert_checks(number, value)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [_Check(number, ast.unparse(operand), "truth", lambda value: value is False)]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            compare = _OPERATORS[type(op)]
            if (known := literal(right)) is not None:
                return [_compared(number, left, lambda value: bool(compare(value, known[0])), ast.unparse(right))]
            if (first := literal(left)) is not None:
                return [_compared(number, right, lambda value: bool(compare(first[0], value)), ast.unparse(left))]
    return [_Check(number, ast.unparse(test), "truth", lambda value: value is True)]


def _compared(number: int, node: ast.expr, right: Callable[[Any], bool], expected: str) -> _Check:
    """A check of a value; for `abs(value - constant)` the constant stays out of the sandbox, too."""
    match node:
        case ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=one, op=ast.Sub(), right=other)], keywords=[]):
            for value, constant in ((one, other), (other, one)):
                if (known := literal(constant)) is not None:
                    near = partial(lambda centre, value: right(abs(value - centre)), known[0])
                    return _Check(number, ast.unparse(value), "value", near, expected)
    return _Check(number, ast.unparse(node), "value", right, expected)


_BEGUN = -1
# Everything it uses is bound before the program runs, which may replace any global. Values are formatted by the methods
# of the built-in types, whatever a subclass overrides, and compared outside. Objects of the program are never true.
_HARNESS = r"""
def harness(program, checks, mark):
    import json, os, sys, types
    execute, evaluate, dumps, write, number, show = exec, eval, json.dumps, os.write, enumerate, repr
    sized = (str, bytes, list, tuple, set, frozenset, dict)
    truths = [(kind, kind.__bool__) for kind in (int, float, complex)] + [(kind, kind.__len__) for kind in sized]
    scalars = [(kind, kind.__repr__) for kind in (bool, int, float, complex, str, bytes, type(None))]
    lists = [(list, "[", "]", "[]"), (tuple, "(", ",)", "()"), (set, "{", "}", "set()")]
    flags, own, fixed = type.__dict__["__flags__"].__get__, 1 << 9, 1 << 8
    subclass, kind_of, join, entries, Failure = issubclass, type, str.join, dict.items, BaseException

    def plain(value):
        kind = kind_of(value)
        for base, text in scalars:
            if subclass(kind, base):
                return text(value)
        if subclass(kind, dict):
            return "{" + join(", ", [plain(key) + ": " + plain(item) for key, item in entries(value)]) + "}"
        for base, opening, closing, empty in lists:
            if subclass(kind, base):
                items = [plain(item) for item in base.__iter__(value)]
                return opening + join(", ", items) + closing if items else empty
        raise TypeError

    def truth(value):
        kind = kind_of(value)
        for base, method in truths:
            if subclass(kind, base):
                return method(value) not in (0, False)
        if flags(kind) & own and not flags(kind) & fixed:
            raise TypeError
        return True if value else False

    kinds = {"value": plain, "text": show, "truth": truth}

    def attempt(what, value):
        try:
            return what(value)
        except Failure:
            return None

    def tell(place, *report):
        write(1, ("\n" + mark + show(place) + " " + dumps(report) + "\n").encode())

    code = compile(program, "program.py", "exec")
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    execute(code, names)
    tell(BEGUN)
    for place, (text, kind) in number(checks):
        try:
            if kind in kinds:
                tell(place, attempt(kinds[kind], evaluate(text, names)))
            else:
                execute(text, names)
                tell(place, None)
        except Failure:
            tell(place)

""".replace("BEGUN", str(_BEGUN))


def _read_marked(stdout: str, mark: str) -> dict[int, list[Any]]:
    """Reports of the harness by index of the check: empty if it raised, else one value, None if it has no form."""
    reports: dict[int, list[Any]] = {}
    for line in stdout.split("\n"):
        if line.startswith(mark):
            try:
                place, _, report = line.removeprefix(mark).partition(" ")
                reports.setdefault(int(place), list(json.loads(report)))
            except (ValueError, TypeError, RecursionError):
                continue  # forged by the program
    return reports


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
