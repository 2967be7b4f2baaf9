"""Programs against their tests, in a sandbox that trusts them (they are the tests' own)."""

import asyncio
import json
import sys
from dataclasses import dataclass
from time import perf_counter

import pytest

from forge_sandbox import CodeVerifier

pytestmark = pytest.mark.processes


@dataclass
class Ended:
    status: str
    stdout: str
    seconds: float


class Trusting:
    """A plain subprocess: no sandbox at all, and good enough for programs written here."""

    async def run(self, program, *, stdin="", time_limit):
        if "BROKEN" in program:
            raise OSError("no room for a sandbox")
        start = perf_counter()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", program, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(stdin.encode()), time_limit)
        except TimeoutError:
            process.kill()
            await process.wait()
            return Ended("timeout", "", perf_counter() - start)
        return Ended("ok" if process.returncode == 0 else "error", out.decode(), perf_counter() - start)


def block(code, language="python"):
    return f"Here it is:\n```{language}\n{code}\n```\nDone."


def score(responses, cases, **settings):
    verifier = CodeVerifier(Trusting(), time_limit=settings.pop("time_limit", 10), **settings)
    return asyncio.run(verifier.score("", responses, json.dumps(cases) if isinstance(cases, list) else cases))


DOUBLE = [{"stdin": "3\n", "stdout": "6"}, {"stdin": "5", "stdout": "10"}]


def test_code_reward_compares_program_stdout():
    programs = [
        block("print(2 * int(input()))"),
        block("print(9)", "") + block("print(2 * int(input()), ' ')", ""),
        block("print(6)"),
        "print(2 * int(input()))",
        block("import sys; sys.exit(1)"),
    ]
    assert score(programs, DOUBLE).values[:, 0].tolist() == [1, 1, 0, 0, 0]
    assert score(programs[:3], DOUBLE, credit="share").values[:, 0].tolist() == [1, 1, 0.5]


def test_code_reward_of_endless_program_is_0():
    found = score([block("while True: pass"), block("print(2 * int(input()))")], DOUBLE[:1], time_limit=0.5)
    assert found.values[0, 0] == 0.0


def test_code_rewards_of_failed_sandbox_are_unscored():
    found = score([block("BROKEN"), block("print(2 * int(input()))")], DOUBLE[:1])
    assert found.values[1, 0] == 1.0
    assert found.reasons == {(0, 0): "the sandbox failed (OSError: no room for a sandbox)"}
    assert score(["a"], None).reasons == {(0, 0): "there is no target with tests"}
    for target in ("nonsense", [], [{"stdin": "a"}], [{"test": "x", "stdout": "y"}], [{"other": 1}], "3"):
        assert "test case" in score(["a"], target).reasons[0, 0]


def test_invalid_code_reward_settings_raise():
    with pytest.raises(ValueError, match="credit"):
        CodeVerifier(Trusting(), credit="some")
    with pytest.raises(ValueError, match="time_limit"):
        CodeVerifier(Trusting(), time_limit=0)
