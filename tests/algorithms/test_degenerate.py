"""What a collapsed policy writes, 200,000 characters of it, costs every reward, parser and verifier linear CPU time.

The criterion is CPU time at n and at 4n characters, so that a busy machine changes nothing: linear is a ratio of 4,
quadratic one of 16. Comparing answers symbolically takes place in another process, and is bounded by its limits.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial

import pytest

from apps.real.constraints import FollowsConstraints
from forge.rewards.rules import CharacterMatch, ExactMatch, JsonMatch, MathReward, ThinkingReward, final_answer
from forge_envs import read_action, schema_of
from forge_sandbox.cases import parse_literal
from forge_sandbox.code_verifier import code_block
from forge_verifiers import AnswerFrequency, MathVerifier, Rule
from forge_verifiers.config import ProcessRewardModelSettings

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")  # pytest has its own filters

LENGTH = 200_000
RATIO, FREE = 10.0, 0.5  # CPU-seconds that quadratic time over so many characters exceeds by far
MOST = 5.0  # CPU-seconds of the longest text

UNITS = ["\n", " ", "\t", "\r\n", "9", "0.", "1 ", "1,111", "1 2/", "1/", "a", "A", "é", "½", "²", "\u200b", "\x00"]
UNITS += [
    "{",
    "}",
    "{}",
    "(",
    ")",
    "[",
    "]",
    "\\",
    "\\'",
    "'",
    '"',
    "`",
    "#",
    "$",
    "^",
    "_",
    "-",
    "=",
    "<",
    ">",
    ".",
    ",",
]
UNITS += [
    r"\boxed{",
    r"\boxed{}",
    r"\boxed",
    r"\frac{",
    r"\frac12",
    r"\text{",
    r"\text{a}",
    "\\,",
    "\\ ",
    "#### ",
    "A:",
]
UNITS += ["answer is ", "answer", "the answer is 4, ", "4 or 5 ", "x=", "<think>", "</think>", "<answer>", "</answer>"]
UNITS += [
    "<tool_call>",
    "</tool_call>",
    '{"a":',
    "[[",
    "add(",
    "add(\\')",
    "add(')",
    'add("',
    "add(1)",
    "search(a",
    "-1+",
]
UNITS += ["```\n", "\n```", "```python\n", " ```", "yes ", "eyes", "not ", "lambda:", "1if ", "@", ";", '{"name":1};']
BASIC = ["\n", " ", "9", "{", "}", "\\", "(", "a"]
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


def scored(verifier, text):
    asyncio.run(verifier.score("q", [text, text + "1"], "5"))


SCORERS = {
    "MathReward of a number": lambda text: MathReward()("q", text, "5"),
    "MathReward of an expression": lambda text: MathReward()("q", text, r"x+\sqrt{2}"),
    "MathReward of a choice": lambda text: MathReward()("q", text, "B"),
    "MathReward, as the target": lambda text: MathReward()("q", "5", text),
    "ExactMatch": lambda text: ExactMatch()("q", text, "5"),
    "CharacterMatch": lambda text: CharacterMatch()("q", text, "5" * LENGTH),
    "JsonMatch": lambda text: JsonMatch()("q", text, '{"a": 5}'),
    "FollowsConstraints": lambda text: FollowsConstraints()("q", text, '{"word": "five", "lower": true}'),
    "ThinkingReward": lambda text: ThinkingReward()("q", text, "5"),
    "final_answer": final_answer,
    "MathVerifier": partial(scored, MathVerifier()),
    "AnswerFrequency": partial(scored, AnswerFrequency()),
    "Rule": partial(scored, Rule(MathReward())),
    "hermes": lambda text: read_action(text, "hermes", TOOLS),
    "llama3": lambda text: read_action(text, "llama3", TOOLS),
    "plain": lambda text: read_action(text, "plain", TOOLS),
    "code_block": code_block,
    "literal": parse_literal,
    "steps": lambda text: list(re.finditer(ProcessRewardModelSettings(path="m", marker="+").separator, text)),
}


def cpu(scorer, text) -> float:
    """CPU-seconds of this process; the less of two, so that what is only done once does not count."""
    spent = []
    for _ in range(2):
        start = time.process_time()
        scorer(text)
        spent.append(time.process_time() - start)
    return min(spent)


def texts(length: int, all_units: bool):
    for unit in UNITS if all_units else BASIC:
        yield repr(unit), (unit * length)[:length]
    for begin, end in FRAMES:
        for unit in BASIC:
            yield repr((begin, unit, end)), begin + (unit * length)[: length - len(begin + end)] + end


def slow(scorer, all_units: bool) -> list[tuple[str, float]]:
    found = []
    for (what, short), (_, long) in zip(texts(LENGTH // 4, all_units), texts(LENGTH, all_units), strict=True):
        start = time.process_time()
        scorer(long)
        spent = time.process_time() - start
        if spent > FREE and (cpu(scorer, long) > RATIO * cpu(scorer, short) or spent > MOST):
            found.append((what, spent))
    return found


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("name", ["MathReward of a number", "final_answer", "plain", "hermes", "code_block", "steps"])
def test_scorers_read_repetitive_text_in_linear_time(name):
    assert slow(SCORERS[name], False) == []
