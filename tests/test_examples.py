"""The examples in docstrings give what they show."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
]


STARTS_A_PROCESS = {"forge.system.trial"}


@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=[pytest.mark.processes] if name in STARTS_A_PROCESS else []) for name in MODULES],
)
def test_docstring_examples_pass(module):
    failed, _ = doctest.testmod(import_module(module))
    assert not failed
