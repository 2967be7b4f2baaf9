"""Programs that try to get out do not, whether root or an ordinary user runs them."""

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


# One of each class of attack, and the others in the full tier; each as one of the two users.
CLASSES = {
    *("fork_bomb", "greed_of_many", "many_files", "write_outside", "read_files", "environment", "inet", "unix"),
    *("daemon", "kill_victim", "ptrace", "read_memory", "setns", "foreign_messages"),
}
HELD = [
    pytest.param(name, *CASES[turn % 2].values, id=name, marks=[] if name in CLASSES else [pytest.mark.full])
    for turn, name in enumerate(ESCAPES)
]


@pytest.mark.parametrize(("name", "level", "user"), HELD)
def test_sandbox_contains_each_hostile_program(name, level, user, sandboxes, neighbourhoods):
    sandbox, around = sandboxes(level, user), neighbourhoods(user)
    spare_our_own(name, around)
    result = asyncio.run(sandbox.run(around.fill(ESCAPES[name][0]), time_limit=20.0))
    assert "ESCAPED" not in result.stdout
    assert around.harm() == ""
    assert "DONE" in result.stdout or result.status == ENDED.get(name), result


COSTLY = {"greed", "greed_of_many", "fork_bomb", "many_files"}
PROOFS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in COSTLY else [])
    for name, (_, succeeds) in ESCAPES.items()
    if succeeds and name != "foreign_messages"
]


@pytest.mark.full
@pytest.mark.parametrize("name", PROOFS)
def test_hostile_program_succeeds_without_sandbox(name, neighbourhoods, sandboxes):
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
