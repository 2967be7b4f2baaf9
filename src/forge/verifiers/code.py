"""Programs in responses, run on tests in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .verifier import Scores, Unscored, collect

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.I)


class Result(Protocol):
    """How a program ended. status: "ok" if it ended by itself with exit code 0; any other word is how it failed."""

    status: str
    stdout: str
    seconds: float


class Sandbox(Protocol):
    """Runs Python programs that nobody trusts. Whatever `run` raises is its own failure, never the program's."""

    async def run(self, program: str, *, stdin: str = "", time_limit: float) -> Result: ...


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program: what it prints for an input, or the value of an expression once it has run, or statements
    that must not raise. One of the three.

    Expected output and value stay outside the sandbox. Statements run inside it, where a program made to cheat could
    see them.
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
        time_limit: seconds for each case.
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
        passed = 0
        for case in cases:
            async with turn:
                right = await self._passes(program, case)
            if not right and self._credit == "all":
                return 0.0
            passed += right
        return passed / len(cases)

    async def _passes(self, program: str, case: Case) -> bool:
        # Told after the tests have run: a program that ends early, with exit code 0, has not passed them.
        mark, added = secrets.token_hex(8), ""
        if case.call is not None:
            added = f"print({mark!r} + repr({case.call}))"
        elif case.test is not None:
            added = f"{case.test}\nprint({mark!r})"
        whole = f"{program}\n{added}\n" if added else program
        try:
            result = await self._sandbox.run(whole, stdin=case.stdin or "", time_limit=self._time_limit)
        except Exception as error:
            raise Unscored(f"the sandbox failed ({type(error).__name__}: {error})") from error
        if result.status != "ok":
            return False
        if case.stdout is not None:
            return _lines(result.stdout) == _lines(case.stdout)
        _, told, value = result.stdout.rpartition(mark)
        return bool(told) and (case.value is None or _same(value.strip(), case.value))


def _lines(text: str) -> list[str]:
    """What is compared: white space at the ends of lines and of the whole does not count."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _same(value: str, expected: str) -> bool:
    try:
        return bool(ast.literal_eval(value) == ast.literal_eval(expected))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value == expected.strip()
