"""Conversations to warm up on: how people answer who have a calculator and mostly do without it.

    python -m apps.tools.demonstrate runs/tools-demonstrations.jsonl

Three in ten use it for every calculation, three in ten for the first, the others only state the result. All results are
right; but a small model that learns to state them cannot reckon them.
"""

from random import Random

from apps.toys import expressions
from apps.toys.demonstrations import write_demonstrations


def conversation(question: str, calculated: int) -> list[dict[str, str]]:
    """The messages of an answer with this many of its calculations left to the calculator."""
    messages = [{"role": "user", "content": question}]
    for step in expressions.steps(question)[:calculated]:
        messages.append({"role": "assistant", "content": f"calc({step})"})
        messages.append({"role": "tool", "name": "calc", "content": str(expressions.evaluate(step))})
    return [*messages, {"role": "assistant", "content": str(expressions.evaluate(question))}]


def converse(question: str, rng: Random) -> list[dict[str, str]]:
    return conversation(question, rng.choices((2, 1, 0), (0.3, 0.3, 0.4))[0])


if __name__ == "__main__":
    write_demonstrations(__doc__, expressions.Expression(), (1, 3), converse)
