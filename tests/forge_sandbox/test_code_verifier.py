"""Programs on tests in the real sandbox; programs that would rather cheat."""

import ast
import asyncio
import json
import os
from contextlib import nullcontext

import pytest

from forge_sandbox import Case, CodeVerifier, forgeable, read_cases
from forge_sandbox.cases import check_passable, checks_of
from forge_sandbox.code_verifier import _check_passes

pytestmark = pytest.mark.processes

CASES = [{"call": f"f({x})", "value": str(x * x)} for x in range(1, 9)]
RIGHT = "def f(x):\n    return x * x\n"


class Counting:
    """The sandbox, and how often it was asked."""

    def __init__(self, sandbox):
        self.sandbox, self.runs = sandbox, 0

    async def run(self, program, *, stdin="", time_limit):
        self.runs += 1
        return await self.sandbox.run(program, stdin=stdin, time_limit=time_limit)


@pytest.fixture
def sandbox(sandboxes):
    return Counting(sandboxes("namespaces", "user" if os.geteuid() else "root"))


def score(sandbox, program, cases=CASES, **settings):
    verifier = CodeVerifier(sandbox, program=str, **{"credit": "share", "time_limit": 3.0} | settings)
    found = asyncio.run(verifier.score("", [program], json.dumps(cases)))
    assert not found.reasons
    return float(found.values[0, 0])


def test_function_call_tests_share_one_program_execution(sandbox):
    assert score(sandbox, RIGHT) == 1.0
    assert sandbox.runs == 1
    assert score(sandbox, "def f(x):\n    return x * x if x > 2 else 1 / 0") == 6 / 8
    assert score(sandbox, "def f(x):\n    return x * x if x > 2 else exit()") == 6 / 8
    assert sandbox.runs == 3


def test_function_call_that_exits_fails_only_one_test(sandbox):
    assert score(sandbox, "import os\ndef f(x):\n    return x * x if x != 3 else os._exit(0)") == 7 / 8
    assert sandbox.runs == 3
    never = "def f(x):\n    while x == 1: pass\n    return x * x"
    assert score(sandbox, never, time_limit=1.0) == 7 / 8
    assert sandbox.runs == 5


def test_time_and_output_limits_apply_per_function_call(sandbox):
    """Together they are more than one execution may have."""
    slow = "import time\ndef f(x):\n    time.sleep(0.4)\n    return x * x"
    assert score(sandbox, slow, CASES[:3], time_limit=1.0) == 1.0
    long = [{"call": f"f({n})", "value": repr("x" * 8000 + str(n))} for n in range(20)]
    assert score(sandbox, "def f(n): return 'x' * 8000 + str(n)", long, credit="all") == 1.0
    chatter = "def f(n):\n    print('y' * 9000)\n    return 'x' * 8000 + str(n) if n else ''"
    assert score(sandbox, chatter, long) == 19 / 20


def test_stdin_and_function_tests_of_one_problem_are_scored(sandbox):
    cases = [
        {"stdin": "4", "stdout": "16"},
        {"call": "f(3)", "value": "9"},
        {"test": "assert f(5) == 25\nassert 4 == f(-2)"},
    ]
    cases.append({"test": "y = f(2)\nassert y == 4"})
    program = RIGHT + "import sys\nfor line in sys.stdin:\n    print(f(int(line)))"
    assert score(sandbox, program, cases) == 1.0
    assert sandbox.runs == 2
    assert score(sandbox, program.replace("x * x", "x * 4"), cases) == 0.25


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        ("{2: {'a': [1.5, None]}, 1: (True, b'x')}", "{1: (True, b'x'), 2: {'a': [1.5, None]}}"),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"),
        ("__import__('collections').OrderedDict(a=1)", "{'a': 1}"),
        ("{3, 1, 2}", "{1, 2, 3}"),
        ("set()", "set()"),
        ("(1,)", "(1,)"),
        ("'a\\n\\u00e9\\'\\x00'", repr("a\né'\0")),
        ("[float('inf')]", "[inf]"),
        ("[]", "[]"),
        ("()", "()"),
        ("[(), {}]", "[(), {}]"),
        ("range(3)", "range(0, 3)"),
        ("2 ** 200", str(2**200)),
    ],
)
def test_function_return_values_are_compared_like_python(returned, value, sandbox):
    assert score(sandbox, f"def f(): return {returned}", [{"call": "f()", "value": value}]) == 1.0
    assert score(sandbox, f"def f(): return [{returned}, 0]", [{"call": "f()", "value": value}]) == 0.0


EQUAL_TO_ALL = (
    "class E:\n    __hash__ = None\n"
    + "".join(
        f"    __{name}__ = lambda *a: True\n" for name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "contains")
    )
    + "    __sub__ = __rsub__ = __abs__ = __add__ = __radd__ = lambda s, *a: s\n"
    "def f(*a): return E()"
)


@pytest.mark.parametrize(
    ("test", "right"),
    [
        ("assert f(3)", "[0]"),
        ("assert f(3)", "__import__('re').match('a', 'a')"),
        ("assert not f(3)", "''"),
        ("assert f(2) == 2 ** 2", "4.0"),
        ("assert 10 ** 9 + 7 == f(2), 'why'", "10 ** 9 + 7"),
        ("assert f(1) == float('inf')", "float('inf')"),
        ("assert f(1) == [1 / 4, -2, None]", "[0.25, -2, None]"),
        ("assert f(1) is None", "None"),
        ("assert f(1) is True", "True"),
        ("assert abs(f(2) - 1.41) < 1e-3", "1.4105"),
        ("assert 1e-3 >= abs(1.41 - f(2))", "1.41"),
        ("assert f(2) > 3", "4"),
        ("assert f(5) == 25 and f(2) <= 25\nassert f(1) != 3 and f(3)", "25"),
    ],
)
def test_assert_tests_are_evaluated_outside_the_program(test, right, sandbox):
    assert score(sandbox, f"def f(*a): return {right}", [{"test": test}]) == 1.0
    assert score(sandbox, EQUAL_TO_ALL, [{"test": test}]) == 0.0
    assert (
        score(sandbox, "def f(*a): return [] if 'not' not in TEST else 1".replace("TEST", repr(test)), [{"test": test}])
        == 0.0
    )


WRONG = "def f(x):\n    return 0\n"
CHEATS = {
    "prints marks": WRONG + "import re\nfor n in range(8): print('0' * 32 + f'{n} [\"{(n + 1) ** 2}\"]')",
    "ends early": "import os, sys\nprint('9'); sys.stdout.flush(); os._exit(0)",
    "ends at exit": WRONG + "import atexit, os\natexit.register(lambda: os._exit(0))",
    "its own print and repr": "import builtins\nbuiltins.print = builtins.repr = lambda *a: '1'\n" + WRONG,
    "its own builtins": "__builtins__ = {}\nimport builtins\nbuiltins.type = builtins.isinstance = lambda *a: int\n"
    + WRONG,
    "its own exec": "import builtins\nbuiltins.eval = lambda *a: 1\nbuiltins.exec = lambda *a: None\n" + WRONG,
    "equals everything": "class E:\n    __eq__ = lambda *a: True\n    __hash__ = None\n    __bool__ = lambda s: True\n"
    "def f(x): return E()",
    "another's text": "class E(int):\n    __repr__ = __str__ = lambda s: '1'\ndef f(x): return E(7)",
    "text of an object": "class E:\n    def __repr__(s): return '1'\ndef f(x): return E()",
    "a list that lies": "class E(list):\n    __iter__ = lambda s: iter([1])\n    __repr__ = lambda s: '1'\n"
    "    __len__ = lambda s: 1\ndef f(x): return E()",
    "its own output": "import io, sys\nsys.stdout = io.StringIO('1')\n" + WRONG,
    "closed output": "import os\nos.close(1)\n" + WRONG,
    "its own writer": "import os, json\nos.write = lambda fd, b: len(b)\njson.dumps = lambda *a: '[\"1\"]'\n" + WRONG,
    "its own main": "import sys\nsys.modules['__main__'] = None\n" + WRONG,
    "raises what ends": "def f(x): raise SystemExit(0)",
    "nothing": "",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_programs_score_0_in_code_verifier(name, sandbox):
    assert score(sandbox, CHEATS[name], CASES[:3]) == 0.0
    assert score(sandbox, CHEATS[name], [{"test": f"assert f({x}) == {x * x}"} for x in (1, 2)]) == 0.0


def test_program_printing_forged_result_lines_gains_no_credit(sandbox):
    """A program can see the mark in its callers, and tell values behind it. It does not know which are right."""
    cheat = """
import os, sys
frame = sys._getframe(1)
mark = frame.f_locals["mark"]
for place in range(8):
    os.write(1, f'{mark}{place} ["0", "0"]\\n'.encode())
os.write(1, f'{mark}2 ["9"]\\n{mark}nonsense\\n{mark}3 {{\\n{mark}-1 []\\n{mark}{"9" * 5000} []\\n'.encode())
os._exit(0)
"""
    assert score(sandbox, cheat) == 0.0
    assert score(sandbox, cheat.replace('["0", "0"]', '["4", "4"]')) == 1 / 8


def test_expected_test_values_are_not_in_program_memory(sandbox):
    search = """
import gc, sys
def f(x):
    return any("".join(["7777", "123"]) in repr(o) for o in [sys._getframe(1).f_locals, *gc.get_objects()][:200]) or x
"""
    cases = [{"call": "f(1)", "value": "7777123"}, {"test": "assert f(2) == 7777123"}, {"call": "f(3)", "value": "3"}]
    assert score(sandbox, search, cases) == 1 / 3


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
            self.assertAlmostEqual(f(given), wanted)
            self.assertIn(f(given), [wanted])
    def test_errors(self):
        with self.assertRaises(TypeError):
            f("a")
if __name__ == "__main__":
    unittest.main()
"""
# Tests that are more than values: each is passed by the right program, and not by an object that equals everything.
TESTS = {
    "check": CHECK,
    "unittest": UNITTEST,
    "unittest.main": UNITTEST.replace('if __name__ == "__main__":\n    unittest', "unittest"),
    "all": "assert all(f(n) == n * n for n in range(9))",
    "isclose": "import math\nassert math.isclose(f(1.5), 2.25)",
    "pow": "assert f(3) == pow(3, 2)",
    "in": "assert f(3) in (9, 10) and f(2) in range(4, 5)",
    "isinstance": "assert isinstance(f(3), int) and f(2) == 4",
    "chained": "assert 8 < f(3) < 10",
    "statements": "x = f(3)\ny = f(x)\nassert y == 81",
    "raise": "if f(3) != 9:\n    raise ValueError('wrong')",
    "in a list": "x = [f(3)]\nassert x == [9]",
    "helper": "def same(a, b):\n    return a == b\nassert same(f(3), 9)",
}
EQUAL = EQUAL_TO_ALL + "\n" + EQUAL_TO_ALL.replace("class E:", "class E(int):").replace("E()", "E(7)")


@pytest.mark.parametrize("name", TESTS)
def test_only_right_programs_pass_each_style_of_code_test(name, sandbox):
    case = {"test": TESTS[name]}
    assert score(sandbox, SQUARE, [case]) == 1.0
    for program in ("def f(x):\n    return x + x + 1", EQUAL_TO_ALL, EQUAL, "1 / 0", "import os; os._exit(0)"):
        assert score(sandbox, program, [case]) == 0.0


def test_dataset_with_forgeable_code_tests_logs_warning():
    decided_outside = ["assert f(1) == 1", "assert f(1)", "assert not f(1)", "f(1)", "import os", "assert f("]
    inside = [TESTS[name] for name in ("check", "unittest", "all", "statements", "raise")]
    assert [forgeable(Case(test=test)) for test in inside] == [True] * len(inside)
    assert [forgeable(Case(test=test)) for test in decided_outside] == [False] * len(decided_outside)
    assert not forgeable(Case(stdout="1"))
    verifier = CodeVerifier()
    targets = [json.dumps([{"test": test}]) for test in (*inside, *decided_outside)]
    assert verifier.warning([*targets, "nonsense", None]).startswith(f"code: 5 of {len(targets) + 2} problems have ")
    assert verifier.warning(targets[5:]) == ""


@pytest.mark.parametrize(
    ("case", "is_passable"),
    [
        ({"call": "f()", "value": None}, True),
        ({"call": "f()", "value": [True, None]}, True),
        ({"call": "f()", "value": "{'a': true}"}, True),
        ({"call": "f()", "value": "some text"}, True),
        ({"test": "assert f() != float('nan') and 1 == 1"}, True),
        ({"call": "f(", "value": "1"}, False),
        ({"call": "f()", "value": "[NaN]"}, False),
        ({"test": "assert f(2) = 4"}, False),
        ({"test": "assert f(2) == 4 and 1 == 2"}, False),
        ({"stdout": 5}, False),
        ({"stdout": "\ud800"}, False),
    ],
)
def test_code_test_that_no_program_can_pass_raises(case, is_passable):
    cases = read_cases(json.dumps([{"call": "g()", "value": "1"}, case]))
    with nullcontext() if is_passable else pytest.raises(ValueError, match="no program can pass test 2: "):
        check_passable(cases)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("True", "true"),
        ("None", "null"),
        ("[True, None]", "[true, null]"),
        ("'a b'", "a b"),
        ("'😀'", '"\\ud83d\\ude00"'),
    ],
)
def test_expected_json_values_are_compared_by_value(body, value):
    checks = checks_of(0, Case(call="f()", value=value))
    assert [_check_passes(check, [repr(ast.literal_eval(body))]) for check in checks] == [True]
    assert [_check_passes(check, ["5"]) for check in checks] == [False]
