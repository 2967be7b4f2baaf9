"""A verifier that runs the programs in responses with tests in a sandbox."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from markdown_it import MarkdownIt

from forge.config.plugin import construct
from forge.data.thoughts import after_thoughts
from forge.rewards.verifier import Scores, Unscored, collect_scores

from .cases import NO_LITERAL, Case, Check, check_passable, checks_of, forgeable, parse_literal, read_cases
from .harness import BEGUN, HARNESS, read_marked
from .sandbox import Sandbox

# Only blocks are parsed, not the text in them. Blocks of HTML are disabled: a line with a tag such as <answer> would
# start one, and hide the fence after it.
_MARKDOWN = MarkdownIt("commonmark").disable(["html_block", "reference"])
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])
PYTHON = frozenset(["python", "py", "python3", "py3", "ipython"])
_NUL = "\uf8ff"


class CodeBlock(NamedTuple):
    """A fenced block: its language in lower case, "" if it has none, and its text."""

    language: str
    code: str


def code_blocks(text: str) -> list[CodeBlock]:
    r"""Return the fenced blocks of a text, in order. A block that is not closed ends with the text.

    >>> code_blocks("```py\n1\n```")
    [CodeBlock(language='py', code='1\n')]
    """
    if "```" not in text and "~~~" not in text:
        return []
    # CommonMark replaces NUL characters. To keep them, they are exchanged for a character of private use.
    fences = (token for token in _MARKDOWN.parse(text.lstrip("\ufeff").replace("\0", _NUL)) if token.type == "fence")
    return [
        CodeBlock(re.split(r"[\s{},:.]+", fence.info.strip("{}. ") + " ")[0].lower(), fence.content.replace(_NUL, "\0"))
        for fence in fences
    ]


def python_block(text: str) -> str | None:
    r"""Return the code of the last block in Python; if there is none, of the last block without a language, or None.

    >>> python_block("```python\nprint(1)\n```")
    'print(1)\n'
    """
    blocks = code_blocks(text)
    python_blocks = [block for block in blocks if block.language in PYTHON]
    programs = python_blocks or [block for block in blocks if not block.language]
    return programs[-1].code if programs else None


def code_block(response: str) -> str | None:
    r"""Return the last Python program in a response, after its thoughts; None if it has none. See `python_block`.

    >>> code_block("<think>x</think>```python\nprint(1)\n```")
    'print(1)\n'
    """
    return python_block(after_thoughts(response))


class CodeVerifier:
    """A verifier that scores the program in a response by tests, from 0 to 1.

    A response without a program, or whose program raises an error or times out, scores 0. A response is unscored (NaN)
    if the sandbox fails, there are no tests, no program can pass them, or the expected output exceeds the sandbox's
    output limit. A program whose output exceeds the limit is wrong.

    Args:
        sandbox: a `forge_sandbox.Sandbox`, its settings, or any object with its method `run`, an exception of which
            means that it failed, not the program; None: a sandbox with default settings. It is started by the first
            program.
        name: the name of the column.
        credit: "all" scores 1 if all tests pass, otherwise 0; "share" scores the share of tests that pass.
        cases: parses the tests in a target.
        program: extracts the program from a response; returns None if there is none.
        time_limit: seconds for one execution, which runs a case with input, or all calls and statements together. Those
            without an answer when the time or output limit is reached are executed again; one fails if it was the first
            of an execution and has no answer.
        concurrency: how many executions of one `score` may run at once.

    Attributes:
        progress: the number of executions that have ended or failed; cancelled ones do not count.

    Raises:
        ValueError: a setting is invalid.
    """

    def __init__(
        self,
        sandbox: Any = None,
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
        is_plain = isinstance(sandbox, dict | None)
        self._sandbox: Any = construct(Sandbox, sandbox or {}, "sandbox") if is_plain else sandbox
        self._credit = credit
        self._cases = cases
        self._program = program
        self._time_limit = time_limit
        self._concurrency = concurrency
        self.progress = 0

    def warning(self, targets: Iterable[str | None]) -> str:
        """Return a warning if some tests of a dataset could be passed by a wrong program; "" if there are none.

        Args:
            targets: the targets of all problems.
        """
        forgeable_problems = problems = 0
        for target in targets:
            with suppress(ValueError):  # invalid tests are reported when they are used
                forgeable_problems += any(map(forgeable, self._cases(target or "")))
            problems += 1
        if not forgeable_problems:
            return ""
        return (
            f"{self.names[0]}: {forgeable_problems} of {problems} problems have tests that run in the program's own "
            "process, which can forge them: write them as values, or as asserts with plain arguments"
        )

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, 1] of the responses to one prompt, from 0 to 1, by the tests in `target`."""
        if target is None:
            return Scores.none(len(responses), 1, "there is no target with tests")
        try:
            cases = self._cases(target)
            check_passable(cases)
        except ValueError as error:
            return Scores.none(len(responses), 1, str(error))
        slots = asyncio.Semaphore(self._concurrency)
        return await collect_scores([self._score_response(response, cases, slots) for response in responses], 1)

    async def close(self) -> None:
        """Close the sandbox, if it has a method `close`."""
        if hasattr(self._sandbox, "close"):
            await self._sandbox.close()

    async def _score_response(self, response: str, cases: Sequence[Case], slots: asyncio.Semaphore) -> float:
        # Return the score of one response; Unscored if it cannot be scored.
        if (program := self._program(response)) is None:
            return 0.0
        try:
            program.encode()
        except UnicodeEncodeError:  # lone surrogates
            return 0.0

        # Calls and statements are run together, and each input in a separate execution.
        passed = await self._run_checks(program, cases, slots)
        for number, case in enumerate(cases):
            if self._credit == "all" and False in passed.values():
                return 0.0
            if case.stdout is not None:
                result = await self._run_program(program, case.stdin or "", slots)
                _check_limit(case.stdout, result)
                has_right_output = _stripped_lines(result.stdout) == _stripped_lines(case.stdout)
                passed[number] = result.status == "ok" and has_right_output

        return float(all(passed.values())) if self._credit == "all" else sum(passed.values()) / len(cases)

    async def _run_checks(self, program: str, cases: Sequence[Case], slots: asyncio.Semaphore) -> dict[int, bool]:
        """Return whether each case with calls or statements passes, by its number.

        With credit "all" it returns at the first failure, and later cases count as passed.
        """
        checks = [check for number, case in enumerate(cases) for check in checks_of(number, case)]
        passed = {check.case: True for check in checks}
        while checks:
            mark = secrets.token_hex(16)
            texts = [(check.text.strip(), check.kind) for check in checks]
            result = await self._run_program(f"{HARNESS}harness({program!r}, {texts!r}, {mark!r})\n", "", slots)
            reports = read_marked(result.stdout, mark)

            # The checks up to the first one without a report are decided now. That one may only have been left without
            # time or output by the checks before it, and is executed again, unless it was the first.
            decided = next((index for index in range(len(checks)) if index not in reports), len(checks)) or 1
            if BEGUN not in reports:
                decided = len(checks)  # the program failed before its checks, and so all of them
            elif 0 not in reports:
                _check_limit(json.dumps(checks[0].expected), result)

            for index, check in enumerate(checks[:decided]):
                if not _check_passes(check, reports.get(index)):
                    passed[check.case] = False
                    if self._credit == "all":
                        return passed

            checks = checks[decided:]

        return passed

    async def _run_program(self, program: str, stdin: str, slots: asyncio.Semaphore) -> Any:
        # Return the sandbox's result of a program, once there is a free slot; Unscored if the sandbox fails.
        async with slots:
            try:
                result = await self._sandbox.run(program, stdin=stdin, time_limit=self._time_limit)
            except Exception as error:
                self.progress += 1
                raise Unscored(f"the sandbox failed ({type(error).__name__}: {error})") from error
            self.progress += 1
            return result


def _check_passes(check: Check, report: list[Any] | None) -> bool:
    # Return whether a check passes by its report, see `read_marked`.
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
    """Raise Unscored if a program's output was cut at a limit that is below the length of the expected output."""
    if result.status == "output" and len(expected) > len(result.stdout):
        raise Unscored(
            f"the expected output has {len(expected)} characters, more than the sandbox's output limit "
            f"{len(result.stdout)}: raise the limit"
        )


def _stripped_lines(text: str) -> list[str]:
    """Return the lines of a text without white space at their ends, which is not compared."""
    return [line.rstrip() for line in text.strip().splitlines()]
