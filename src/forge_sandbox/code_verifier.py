"""Verification of programs in responses, by running tests in a sandbox."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, runtime_checkable

from forge.config.plugin import construct
from forge.data.thoughts import after_thoughts
from forge.rewards.verifier import Scores, Unscored, collect_scores
from forge_sandbox.code_blocks import python_block

from .cases import NO_LITERAL, Case, Check, checks_of, forgeable, parse_literal, read_cases
from .harness import BEGUN, HARNESS, read_marked
from .sandbox import Sandbox

Json = Any  # plain data of a report


@runtime_checkable
class Runner(Protocol):
    """Runs untrusted programs, as `forge_sandbox.Sandbox`. Exceptions are failures of the runner, not the program."""

    async def run(self, program: str, *, stdin: str = "", time_limit: float) -> Any:
        """Run a program for at most `time_limit` seconds; return an object with `status` and `stdout`."""


def code_block(response: str) -> str | None:
    r"""Return the program of a response after its thoughts, as `python_block` reads it; None if it has none.

    >>> code_block("<think>x</think>```python\nprint(1)\n```")
    'print(1)\n'
    """
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
    ) -> None:
        if credit not in ("all", "share"):
            raise ValueError(f"credit must be all or share, got {credit!r}")
        if time_limit <= 0 or concurrency < 1:
            raise ValueError(f"time_limit must be above 0, concurrency at least 1: got {time_limit}, {concurrency}")
        runner: Runner = construct(Sandbox, sandbox or {}, "sandbox") if isinstance(sandbox, dict | None) else sandbox
        self.names: tuple[str, ...] = (name,)
        self._sandbox = runner
        self._credit = credit
        self._cases = cases
        self._program = program
        self._time_limit = time_limit
        self._concurrency = concurrency
        self.progress = 0

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
        return await collect_scores([self._score_response(response, cases, slots) for response in responses], 1)

    async def close(self) -> None:
        """Close the sandbox, if it has a `close`."""
        if hasattr(self._sandbox, "close"):
            await self._sandbox.close()

    async def _score_response(self, response: str, cases: Sequence[Case], slots: asyncio.Semaphore) -> float:
        program = self._program(response)
        if program is None:
            return 0.0
        try:
            program.encode()
        except UnicodeEncodeError:  # lone surrogates
            return 0.0

        # Calls and statements share executions; inputs have one each.
        passed = await self._run_checks(program, cases, slots)
        for number, case in enumerate(cases):
            if self._credit == "all" and False in passed.values():
                return 0.0
            if case.stdout is not None:
                result = await self._run_program(program, case.stdin or "", slots)
                _check_limit(case.stdout, result)
                passed[number] = result.status == "ok" and _stripped_lines(result.stdout) == _stripped_lines(
                    case.stdout
                )

        return float(all(passed.values())) if self._credit == "all" else sum(passed.values()) / len(cases)

    async def _run_checks(self, program: str, cases: Sequence[Case], slots: asyncio.Semaphore) -> dict[int, bool]:
        """Return whether the cases with calls and statements pass; with credit "all" up to the first failure."""
        checks = [check for number, case in enumerate(cases) for check in checks_of(number, case)]
        passed = {check.case: True for check in checks}
        while checks:
            mark = secrets.token_hex(16)
            texts = [(check.text.strip(), check.kind) for check in checks]
            script = f"{HARNESS}harness({program!r}, {texts!r}, {mark!r})\n"
            result = await self._run_program(script, "", slots)
            reports = read_marked(result.stdout, mark)

            # The first unanswered check may have run out of time or output used by earlier ones, unless it was first.
            answered = next((index for index in range(len(checks)) if index not in reports), len(checks)) or 1
            if BEGUN not in reports:
                answered = len(checks)  # the program itself failed, and so all checks
            elif 0 not in reports:
                _check_limit(json.dumps(checks[0].expected), result)

            for index, check in enumerate(checks[:answered]):
                if not _check_passes(check, reports.get(index)):
                    passed[check.case] = False
                    if self._credit == "all":
                        return passed

            checks = checks[answered:]

        return passed

    async def _run_program(self, program: str, stdin: str, slots: asyncio.Semaphore) -> Any:
        async with slots:
            try:
                result = await self._sandbox.run(program, stdin=stdin, time_limit=self._time_limit)
            except Exception as error:
                self.progress += 1
                raise Unscored(f"the sandbox failed ({type(error).__name__}: {error})") from error
            self.progress += 1
            return result


def _check_passes(check: Check, report: list[Json] | None) -> bool:
    if not report:
        return False
    value = report[0]
    if check.kind == "value":
        parsed = parse_literal(value) if isinstance(value, str) else None
        value = NO_LITERAL if parsed is None else parsed[0]
    elif check.kind == "text" and isinstance(value, str):
        value = value.strip()
    try:
        return check.right(value)
    except (TypeError, ValueError, OverflowError):  # not comparable
        return False


def _check_limit(expected: str, result: Any) -> None:
    """Raise Unscored if the expected output exceeds the sandbox's limit."""
    if result.status == "output" and len(expected) > len(result.stdout):
        raise Unscored(f"{len(expected)} characters are expected, the sandbox's output limit is {len(result.stdout)}")


def _stripped_lines(text: str) -> list[str]:
    """Return lines without trailing white space, which is not compared."""
    return [line.rstrip() for line in text.strip().splitlines()]
