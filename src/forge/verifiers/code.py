"""Programs in responses, run on tests in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .verifier import Scores, Unscored, collect

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.I)


class Result(Protocol):
    """How a program ended. status: "ok" if it ended by itself with exit code 0; any other word is how it failed."""

    @property
    def status(self) -> str: ...

    @property
    def stdout(self) -> str: ...

    @property
    def seconds(self) -> float: ...


class Sandbox(Protocol):
    """Runs Python programs that nobody trusts. Whatever `run` raises is its own failure, never the program's."""

    async def run(self, program: str, *, stdin: str = "", time_limit: float) -> Result: ...


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program: what it prints for an input, or the value of an expression once it has run, or statements
    that must not raise. One of the three.

    Expected output and value stay outside the sandbox, and so do those of statements that are nothing but
    `assert expression == literal`. Other statements run inside it, where a program made to cheat could see them.
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
    """Cases from JSON: a list of objects with the fields of `Case`. ValueError: it is no such list, or empty."""
    try:
        cases = [Case(**row) for row in json.loads(target)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the target is no list of test cases ({error}): {target[:80]!r}") from None
    if not cases:
        raise ValueError("the target has no test case")
    return cases


def code_block(response: str) -> str | None:
    """The last fenced block of Python, or of no language said; None where there is none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else None


class CodeVerifier:
    """Whether the program of a response passes its tests: 1 if all, else 0, or the share that it passes.

    A response without a program, and a program that fails, ends in error or takes too long, has passed nothing: 0. If
    the sandbox fails, or there are no tests, there is no score.

    Args:
        sandbox: runs the programs. There is no default: nothing here would run them safely.
        name: of the column.
        credit: "all" or "share".
        cases: the tests from the target of a call.
        program: the program from a response, None where it has none.
        time_limit: seconds for an execution: of a case with input, or of all calls and statements together. Those
            that one of them keeps from their turn, as it never ends, are executed again without it.
        concurrency: most cases of a call at a time.

    Raises:
        ValueError: a setting that cannot be; says which.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        name: str = "code",
        *,
        credit: Literal["all", "share"] = "all",
        cases: Callable[[str], Sequence[Case]] = read_cases,
        program: Callable[[str], str | None] = code_block,
        time_limit: float = 5.0,
        concurrency: int = 4,
    ) -> None:
        if credit not in ("all", "share"):
            raise ValueError(f"credit must be all or share, got {credit!r}")
        if time_limit <= 0 or concurrency < 1:
            raise ValueError(f"time_limit must be above 0, concurrency at least 1: got {time_limit}, {concurrency}")
        self.names: tuple[str, ...] = (name,)
        self._sandbox, self._credit, self._cases, self._program = sandbox, credit, cases, program
        self._time_limit, self._concurrency = time_limit, concurrency
        known = cases is read_cases and program is code_block
        self.fingerprint = f"code {credit} {time_limit} {type(sandbox).__qualname__}" if known else None

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """One number for each response, in [0, 1]. `target` holds the tests."""
        if target is None:
            return Scores.none(len(responses), 1, "there is no target with tests")
        try:
            cases = self._cases(target)
        except ValueError as error:
            return Scores.none(len(responses), 1, str(error))
        turn = asyncio.Semaphore(self._concurrency)
        return await collect([self._passed(response, cases, turn) for response in responses], 1)

    async def _passed(self, response: str, cases: Sequence[Case], turn: asyncio.Semaphore) -> float:
        program = self._program(response)
        if program is None:
            return 0.0
        right = await self._checked(program, cases, turn)
        for number, case in enumerate(cases):
            if self._credit == "all" and False in right.values():
                return 0.0
            if case.stdout is not None:
                result = await self._run(program, case.stdin or "", turn)
                right[number] = result.status == "ok" and _lines(result.stdout) == _lines(case.stdout)
        return float(all(right.values())) if self._credit == "all" else sum(right.values()) / len(cases)

    async def _checked(self, program: str, cases: Sequence[Case], turn: asyncio.Semaphore) -> dict[int, bool]:
        """Which cases with calls and statements pass; with credit for all of them alone, the first that does not is the
        last that is known."""
        checks = [check for number, case in enumerate(cases) for check in _checks(number, case)]
        right = {check.case: True for check in checks}
        while checks:
            mark = secrets.token_hex(16)
            result = await self._run(_harness(program, checks, mark), "", turn)
            told = _told(result.stdout, mark)
            # What was not told had not its turn, but for the first, which is what ended it all.
            done = next((place for place in range(len(checks)) if place not in told), len(checks) - 1) + 1
            if _BEGUN not in told:
                done = len(checks)
            for place, check in enumerate(checks[:done]):
                if not _passes(check, told.get(place)):
                    right[check.case] = False
                    if self._credit == "all":
                        return right
            checks = checks[done:]
        return right

    async def _run(self, program: str, stdin: str, turn: asyncio.Semaphore) -> Result:
        async with turn:
            try:
                return await self._sandbox.run(program, stdin=stdin, time_limit=self._time_limit)
            except Exception as error:
                raise Unscored(f"the sandbox failed ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True)
class _Check:
    """A call and the value that it should have, or statements without one; of which case."""

    case: int
    text: str
    value: str | None


def _checks(number: int, case: Case) -> list[_Check]:
    if case.call is not None:
        return [_Check(number, case.call, case.value)]
    if case.test is None:
        return []
    try:
        found = [_comparison(number, statement) for statement in ast.parse(case.test).body]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        found = []
    return [check for check in found if check] if found and all(found) else [_Check(number, case.test, None)]


def _comparison(number: int, statement: ast.stmt) -> _Check | None:
    """Of `assert expression == literal`; None of anything else."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            for call, value in ((left, right), (right, left)):
                if _literal(ast.unparse(value)) is not None:
                    return _Check(number, ast.unparse(call), ast.unparse(value))
    return None


_BEGUN = -1
# What it needs is bound before the program runs, which may exchange anything by name. Values are written by the methods
# of Python's own types, whatever those of a subclass say, and compared outside.
_HARNESS = r"""
def harness(program, checks, mark):
    import json, os, sys, types
    execute, evaluate, dumps, write, number, show = exec, eval, json.dumps, os.write, enumerate, repr
    scalars = [(kind, kind.__repr__) for kind in (bool, int, float, complex, str, bytes, type(None))]
    lists = [(list, "[", "]"), (tuple, "(", ",)"), (set, "{", "}")]
    subclass, kind_of, join, entries, Failure = issubclass, type, str.join, dict.items, BaseException

    def plain(value):
        kind = kind_of(value)
        for base, text in scalars:
            if subclass(kind, base):
                return text(value)
        if subclass(kind, dict):
            return "{" + join(", ", [plain(key) + ": " + plain(item) for key, item in entries(value)]) + "}"
        for base, opening, closing in lists:
            if subclass(kind, base):
                items = [plain(item) for item in base.__iter__(value)]
                return opening + join(", ", items) + closing if items else base.__name__ + "()"
        raise TypeError

    def attempt(what, value):
        try:
            return what(value)
        except Failure:
            return None

    def tell(place, *said):
        write(1, ("\n" + mark + show(place) + " " + dumps(said) + "\n").encode())

    code = compile(program, "program.py", "exec")
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    execute(code, names)
    tell(BEGUN)
    for place, (text, has_value) in number(checks):
        try:
            if has_value:
                value = evaluate(text, names)
                tell(place, attempt(plain, value), attempt(show, value))
            else:
                execute(text, names)
                tell(place, None)
        except Failure:
            tell(place)

""".replace("BEGUN", str(_BEGUN))


def _harness(program: str, checks: Sequence[_Check], mark: str) -> str:
    given = [(check.text.strip(), check.value is not None) for check in checks]
    return f"{_HARNESS}harness({program!r}, {given!r}, {mark!r})\n"


def _told(stdout: str, mark: str) -> dict[int, list[Any]]:
    """What was said behind the mark: nothing where a check has failed, else its value, plain and as `repr` has it."""
    told: dict[int, list[Any]] = {}
    for line in stdout.split("\n"):
        if line.startswith(mark):
            try:
                place, _, said = line.removeprefix(mark).partition(" ")
                told.setdefault(int(place), list(json.loads(said)))
            except (ValueError, TypeError, RecursionError):
                continue  # the program's own invention
    return told


def _passes(check: _Check, said: list[Any] | None) -> bool:
    if not said:
        return False
    if check.value is None:
        return said == [None]
    plain, text = (*said, None)[:2]
    expected = _literal(check.value)
    if expected is None:
        return isinstance(text, str) and text.strip() == check.value.strip()
    value = _literal(plain) if isinstance(plain, str) else None
    return value is not None and bool(value[0] == expected[0])


def _lines(text: str) -> list[str]:
    """What is compared: white space at the ends of lines and of the whole does not count."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _literal(text: str) -> tuple[Any] | None:
    """The value that a text writes; None if it is no literal."""
    try:
        return (ast.literal_eval(text.strip()),)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
