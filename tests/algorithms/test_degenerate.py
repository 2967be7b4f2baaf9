"""What a collapsed policy writes, 500,000 characters of it, costs rewards and parsers linear CPU time.

No time is measured: a quadratic search of one of these texts takes over ten minutes (8 s of 50,000 characters), beyond
pytest's limit. Comparing answers symbolically takes place in another process, and is bounded by its limits.
"""

import re

import pytest

from forge.rewards.rules import MathReward, final_answer
from forge_envs import read_action, schema_of
from forge_sandbox.code_verifier import code_block
from forge_verifiers.config import ProcessRewardModelSettings

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")  # pytest has its own filters

LENGTH = 500_000
UNITS = ["\n", " ", "9", "{", "}", "\\", "(", "a"]
FRAMES = [("{}", ""), ("answer is", "x"), ("A", "A:"), ("```", "x"), ("5", "5"), (r"\boxed", "}"), (r"\boxed{", "}")]
FRAMES += [
    ("####", "\n"),
    ("<answer>", "</answer>"),
    ("add(", ")"),
    ("\n", "x"),
    ("<tool_call>", "</tool_call>"),
    ("{", "}"),
]


def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


def search(query: str) -> str:
    """Search."""
    return query


TOOLS = (schema_of(add), schema_of(search))
SCORERS = {
    "MathReward of a number": lambda text: MathReward()("q", text, "5"),
    "final_answer": final_answer,
    "hermes": lambda text: read_action(text, "hermes", TOOLS),
    "plain": lambda text: read_action(text, "plain", TOOLS),
    "code_block": code_block,
    "steps": lambda text: list(re.finditer(ProcessRewardModelSettings(path="m", marker="+").separator, text)),
}


def repetitive_texts():
    for begin, end in [("", ""), *FRAMES]:
        for unit in UNITS:
            yield begin + (unit * LENGTH)[: LENGTH - len(begin + end)] + end


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("name", SCORERS)
def test_scorers_handle_repetitive_text_in_linear_time(name):
    for text in repetitive_texts():
        SCORERS[name](text)
