"""Tests that are more than values run without the program; those that cannot are counted."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from forge.data.config import DatasetConfig
from forge.models import build_small_model
from forge.recipes.prepare import check_data
from forge.recipes.schema import EvalConfig
from forge_sandbox import Case, CodeVerifier, forgeable

from .conftest import CASES as LEVELS
from .test_code_verifier import CHEATS, EQUAL_TO_ALL, score

SQUARE = "def f(x):\n    return x * x\n"
CHECK = """
METADATA = {'author': 'x'}
def check(candidate):
    assert candidate(3) == 9, "three"
    for n in range(5):
        assert candidate(n) == n ** 2
    assert abs(candidate(1.5) - 2.25) < 1e-6
check(f)
"""
UNITTEST = """
import unittest
class TestF(unittest.TestCase):
    def setUp(self):
        self.known = [(2, 4), (3, 9)]
    def test_values(self):
        for given, wanted in self.known:
            self.assertEqual(f(given), wanted)
    def test_errors(self):
        with self.assertRaises(TypeError):
            f("a")
if __name__ == "__main__":
    unittest.main()
"""
RANDOM = """
import random
for _ in range(20):
    n = random.randint(-99, 99)
    assert f(n) == n * n
"""
TESTS = {
    "check": CHECK,
    "unittest": UNITTEST,
    "unittest.main": UNITTEST.replace('if __name__ == "__main__":\n    unittest', "unittest"),
    "random": RANDOM,
    "all": "assert all(f(n) == n * n for n in range(9))",
    "isclose": "import math\nassert math.isclose(f(1.5), 2.25)",
    "isclose of no import": "assert math.isclose(f(1.5), 2.25)",
    "pow": "assert f(3) == pow(3, 2)",
    "in": "assert f(3) in (9, 10)",
    "isinstance": "assert isinstance(f(3), int) and f(2) == 4",
    "chained": "assert 8 < f(3) < 10",
    "statements": "x = f(3)\ny = f(x)\nassert y == 81",
    "raise": "if f(3) != 9:\n    raise ValueError('wrong')",
    "alone": "x = f(3)\nassert x - 9 == 0 and x == 9",
    "helper": "def same(a, b):\n    return a == b\nassert same(f(3), 9)",
}
FRAMES = """
import json, os, sys
frame = sys._getframe(1)
while frame is not None:
    mark = frame.f_locals.get("mark")
    if mark is not None:
        for place in range(-1, 400):
            for text in ("true", "null", '"value", "True", null', '"object", true, null', '"9"'):
                os.write(1, f"{mark}{place} [{text}]\\n".encode())
        os.write(1, (mark + json.dumps({"asked": [], "unknown": False, "unsupported": False, "passed": True})).encode())
    frame = frame.f_back
os._exit(0)
"""
EQUAL = EQUAL_TO_ALL + "\n" + EQUAL_TO_ALL.replace("class E:", "class E(int):").replace("E()", "E(7)")


@pytest.fixture
def sandbox(sandboxes):
    return sandboxes("namespaces", "user" if os.geteuid() else "root")


@pytest.mark.processes
@pytest.mark.parametrize("name", TESTS)
def test_only_right_programs_pass(name, sandbox):
    case = {"test": TESTS[name]}
    assert not forgeable(Case(**case))
    assert score(sandbox, SQUARE, [case]) == 1.0
    for program in ("def f(x):\n    return x + x + 1", EQUAL_TO_ALL, EQUAL, FRAMES, SQUARE + FRAMES):
        assert score(sandbox, program, [case]) == 0.0


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("test", ["check", "all", "unittest", "statements"])
@pytest.mark.parametrize("name", CHEATS)
def test_cheats_gain_nothing(name, test, sandbox):
    assert score(sandbox, CHEATS[name], [{"test": TESTS[test]}]) == 0.0


@pytest.mark.processes
@pytest.mark.parametrize(("level", "user"), LEVELS)
def test_at_each_level(level, user, sandboxes):
    for program, right in ((SQUARE, 1.0), (EQUAL_TO_ALL, 0.0), (FRAMES, 0.0)):
        assert score(sandboxes(level, user), program, [{"test": CHECK}, {"test": UNITTEST}], time_limit=20.0) == right


OBJECTS = {
    "methods": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()",
        "s = Stack()\ns.push(1)\ns.push([2])\nassert s.pop() == [2]\nassert len(s.items) == 1\nassert s.pop() == 1",
        "class Stack:\n    items = [0]\n    push = lambda *a: None\n    pop = lambda s: 1",
    ),
    "arguments in place": ("def f(x): x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]", "def f(x): return sorted(x)"),
    "generators": (
        "def f(n): yield from range(n)",
        "assert sum(f(4)) == 6\nassert [*f(2)] == [0, 1]",
        "f = lambda n: range(n + 1)",
    ),
    "two objects": (
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
        "    def __add__(self, other): return P(self.x + other.x)",
        "assert P(1) + P(2) == P(3)\nassert (P(1) + P(2)).x == 3\nassert P(1) != P(2)",
        "class P:\n    def __init__(self, x): self.x = x\n    __add__ = lambda s, o: s",
    ),
    "Solution": (
        "class Solution:\n    def twice(self, x): return 2 * x",
        "s = Solution()\nassert all(s.twice(n) == n + n for n in range(3))",
        "class Solution:\n    def twice(self, x): return 0",
    ),
    "a state": (
        "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
        "assert f() == 1\nx = f()\nassert [f(), x] == [3, 2]",
        "def f(): return 1",
    ),
    "steps": ("def f(x): return x + 1", "x = 0\nwhile x < 5:\n    x = f(x)\nassert x == 5", "def f(x): return x + 2"),
    "not a number": (
        "def f(x): return float('nan')",
        "import math\nassert math.isnan(f(float('inf'))) and f(1) != f(1)",
        "def f(x): return x",
    ),
    "a constant": ("LIMIT = 5", "import math\nassert math.sqrt(LIMIT) < 3 and LIMIT + 1 == 6", "LIMIT = 4"),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_the_program(name, sandbox):
    right, test, wrong = OBJECTS[name]
    assert not forgeable(Case(test=test))
    assert score(sandbox, right, [{"test": test}]) == 1.0
    assert score(sandbox, wrong, [{"test": test}]) == 0.0


@pytest.mark.processes
def test_a_program_that_ends_in_a_call_fails_that_test_alone(sandbox):
    tests = [{"test": TESTS["all"]}, {"test": "x = f(-1)\nassert x == 1"}]
    for end in ("__import__('os')._exit(0)", "exit()", "[0][1]"):
        assert score(sandbox, f"def f(x): return x * x if x >= 0 else {end}", tests) == 0.5
    assert score(sandbox, "def f(x):\n    while x < 0: pass\n    return x * x", tests, time_limit=1.0) == 0.5
    for program in ("1 / 0", "def f(x", "", "def g(x): return x"):
        assert score(sandbox, program, tests) == 0.0


@pytest.mark.processes
def test_what_has_no_answer(sandbox):
    verifier = CodeVerifier(sandbox, program=str)
    for test, reason in (
        ("g = lambda x: x\nassert f(g) == 1", "an argument that has no literal form"),
        ("x = f('a' * 10 ** 5)\nassert x == 1", "exceed the sandbox's output limit"),
    ):
        found = asyncio.run(verifier.score("", ["def f(x): return 1"], json.dumps([{"test": test}])))
        assert reason in found.reasons[0, 0]
    never = "x = 0\nwhile x < 5:\n    x = f(x)\nassert x == 5"
    assert score(sandbox, "def f(x): return x - 1", [{"test": never}]) == 0.0


FORGEABLE = [
    "import numpy as np\nassert np.allclose(f(1), 1)",
    "class Node:\n    pass\nassert f(Node()) == 1",
    "assert f(lambda x: x) == [f(1)]",
    "import os\nassert os.path.exists(f(1))",
    "assert f.__name__ == g(1)",
    "assert np.allclose(f(1), 1)",
    "from unittest.mock import patch\nwith patch('x'):\n    assert f(1) == 1",
]
NOT = ["assert f(1) == 1", "assert f(1)", "assert not f(1)", "f(1)", "import os", "assert f(", *TESTS.values()]


def test_a_data_set_with_tests_that_can_be_forged_is_named():
    assert [forgeable(Case(test=test)) for test in FORGEABLE] == [True] * len(FORGEABLE)
    assert [forgeable(Case(test=test)) for test in NOT] == [False] * len(NOT)
    assert not forgeable(Case(stdout="1"))
    verifier = CodeVerifier()
    targets = [json.dumps([{"test": test}]) for test in (*FORGEABLE, *NOT)]
    assert verifier.warning([*targets, "nonsense", None]).startswith(f"code: 7 of {len(targets) + 2} problems have ")
    assert verifier.warning(targets[7:]) == ""


def test_the_count_is_logged_when_a_run_opens_its_data(tmp_path, caplog):
    shape = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 64}
    build_small_model(tmp_path / "model", seed=0, alphabet=None, **shape)
    targets = [json.dumps([{"test": test}]) for test in (*FORGEABLE, "assert f(1) == 1")]
    rows = [{"question": f"write f {number}", "answer": target} for number, target in enumerate(targets)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DatasetConfig(path=str(tmp_path / "rows.jsonl"), target_field="answer")
    for scorers, count in (([CodeVerifier(), print], 1), ([], 0)):
        caplog.clear()
        check_data(data, EvalConfig(problems=0), str(tmp_path / "model"), 0, scorers)
        assert caplog.text.count("code: 7 of 8 problems have tests that run in the program's own process") == count
