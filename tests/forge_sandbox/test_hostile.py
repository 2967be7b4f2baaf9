"""Programs that try to get out do not, at any level, whether root or an ordinary user runs them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

import pytest

from .conftest import CASES, ORDINARY, Neighbourhood, python_of
from .programs import ESCAPES

pytestmark = pytest.mark.processes


def spare_our_own(name: str, around: Neighbourhood) -> None:
    if name == "kill_everybody" and around.user == os.geteuid():
        pytest.skip("if it got out, it would end all that the user of these tests runs")


ENDED = {"greed_of_many": "memory"}  # before it is done


# `make test` runs each program once, in turn at each level as each user, so that every class of attack meets all of
# them; the full tier runs it at another level too. The whole product is slow.
QUICK = [case for case in CASES if not case.marks]
HELD = [
    pytest.param(
        name,
        *case.values,
        id=f"{name}-{case.id}",
        marks=[*case.marks, *{0: [], 2: [pytest.mark.full]}.get((place - turn) % len(QUICK), [pytest.mark.slow])]
        if case in QUICK
        else case.marks,
    )
    for turn, name in enumerate(ESCAPES)
    for place, case in enumerate(CASES)
]


@pytest.mark.parametrize(("name", "level", "user"), HELD)
def test_held(name, level, user, sandboxes, neighbourhoods):
    sandbox, around = sandboxes(level, user), neighbourhoods(user)
    spare_our_own(name, around)
    result = asyncio.run(sandbox.run(around.fill(ESCAPES[name][0]), time_limit=20.0))
    assert "ESCAPED" not in result.stdout
    assert around.harm() == ""
    assert "DONE" in result.stdout or result.status == ENDED.get(name), result


@pytest.mark.slow
@pytest.mark.parametrize(("level", "user"), CASES)
@pytest.mark.parametrize("name", ESCAPES)
def test_held_as_a_cell(name, level, user, sandboxes, neighbourhoods):
    """Between two cells, too; the session next to it runs as if nothing were."""
    sandbox, around = sandboxes(level, user), neighbourhoods(user)
    spare_our_own(name, around)

    async def main():
        async with sandbox.session() as python, sandbox.session() as other:
            result = await python.run(around.fill(ESCAPES[name][0]), time_limit=20.0)
            again = await python.run("print('again')")
            return result, again, (await other.run("print('other')")).stdout

    result, again, other = asyncio.run(main())
    assert "ESCAPED" not in result.stdout + again.stdout
    assert around.harm() == ""
    assert "DONE" in result.stdout or result.status == ENDED.get(name), result
    assert again.status in ("ok", "ended"), again
    assert other == "other\n"


COSTLY = {"greed", "greed_of_many", "fork_bomb", "many_files"}
PROOFS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in COSTLY else [])
    for name, (_, succeeds) in ESCAPES.items()
    if succeeds and name != "foreign_messages"
]


@pytest.mark.full
@pytest.mark.parametrize("name", PROOFS)
def test_not_held_without_a_sandbox(name, neighbourhoods, sandboxes):
    """What the programs do can be done, and is seen."""
    if name == "setns":
        asyncio.run(sandboxes("namespaces", "user").run("pass"))  # starts processes of this user in other namespaces
    around = neighbourhoods("user")
    spare_our_own(name, around)
    as_user = {} if os.geteuid() else {"user": ORDINARY, "group": ORDINARY}
    words = [python_of(None if os.geteuid() else ORDINARY), "-I", "-c", around.fill(ESCAPES[name][0])]
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=120, close_fds=False, env={"SECRET": around.text}, **as_user
    )
    until = time.monotonic() + 10.0
    seen = [around.harm(), *(["escaped"] if "ESCAPED" in result.stdout else [])]
    while not any(seen) and time.monotonic() < until:  # a signal takes its time
        time.sleep(0.01)
        seen.append(around.harm())
    assert any(seen), result.stderr
