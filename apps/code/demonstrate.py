"""Programs to warm up on, from a corpus with bugs: every third line or so looks right and is not.

python -m apps.code.demonstrate runs/code-demonstrations.jsonl
"""

import argparse
import json
from pathlib import Path
from random import Random

from forge.data import programs, tasks


def body(question: str, bugs: float, rng: Random) -> str:
    """The lines of a program, each with a bug in so many of all cases."""
    operations = (programs.OPERATIONS[word] for word in question.split(","))
    return "\n".join(each.wrong if rng.random() < bugs else each.right for each in operations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--difficulty", type=int, nargs=2, default=(2, 3), help="steps of a program")
    parser.add_argument("--bugs", type=float, default=0.35, help="share of lines that have one")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = Random(arguments.seed)
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    with arguments.path.open("w") as file:
        for index in range(arguments.rows):
            question = tasks.row("program", index, seed=arguments.seed, difficulty=arguments.difficulty).question
            answer = body(question, arguments.bugs, rng)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
