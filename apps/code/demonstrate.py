"""Programs to warm up on, from a corpus with bugs: every third line or so looks right and is not.

python -m apps.code.demonstrate runs/code-demonstrations.jsonl
"""

from random import Random

from apps.toys import programs
from apps.toys.demonstrations import write_demonstrations

BUGS = 0.35  # share of lines that have one


def body(question: str, bugs: float, rng: Random) -> str:
    """The lines of a program, each with a bug in that many of all cases."""
    operations = (programs.OPERATIONS[word] for word in question.split(","))
    return "\n".join(each.wrong if rng.random() < bugs else each.right for each in operations)


def converse(question: str, rng: Random) -> list[dict[str, str]]:
    answer = body(question, BUGS, rng)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    write_demonstrations(__doc__, programs.Program(), (2, 3), converse)
