"""Conversations to warm up on: how people answer who have a calculator and mostly do without it.

    python -m apps.tools.demonstrate runs/tools-demonstrations.jsonl

Three in ten use it for every calculation, three in ten for the first, the others only state the result. All results are
right; but a small model that learns to state them cannot reckon them.
"""

import argparse
import json
from pathlib import Path
from random import Random

from forge.data import expressions, tasks


def conversation(question: str, calculated: int) -> list[dict[str, str]]:
    """The messages of an answer with this many of its calculations left to the calculator."""
    messages = [{"role": "user", "content": question}]
    for step in expressions.steps(question)[:calculated]:
        messages.append({"role": "assistant", "content": f"calc({step})"})
        messages.append({"role": "tool", "name": "calc", "content": str(expressions.evaluate(step))})
    return [*messages, {"role": "assistant", "content": str(expressions.evaluate(question))}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--difficulty", type=int, nargs=2, default=(1, 3), help="digits")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = Random(arguments.seed)
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    with arguments.path.open("w") as file:
        for index in range(arguments.rows):
            question = tasks.row("expression", index, seed=arguments.seed, difficulty=arguments.difficulty).question
            calculated = rng.choices((2, 1, 0), (0.3, 0.3, 0.4))[0]
            file.write(json.dumps({"messages": conversation(question, calculated)}) + "\n")


if __name__ == "__main__":
    main()
