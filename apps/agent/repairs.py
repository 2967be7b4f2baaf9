"""Tasks for an agent that repairs functions, and recorded repairs to warm up on.

    python -m apps.agent.repairs runs/repairs

writes train.jsonl, test.jsonl and repairs.jsonl into a folder. A hash of a function's name and its bug decides whether
the pair is held out, has recorded repairs, or is a task of training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal

from apps.agent.functions import FUNCTIONS, Bug, Function, bugs_of, named

Part = Literal["held out", "recorded", "practised"]
FILE = "fix.py"  # what the agent repairs
NAMES = "bcjkqxy"  # of arguments: letters that are nowhere else in the functions, so that sed meets no other
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SYSTEM = "Repair fix.py."  # as in mini/mini.yaml
TASK = "One bash block."

# The function runs in another process, which does not have what is expected: neither an exit code nor a patched
# module of its can pass for a result.
TEST = """\
import json, os, subprocess, sys
os.remove(__file__)
cases = json.loads({cases!r})
code = "import json, runpy; f = runpy.run_path('{file}')[{name!r}]; print([f(*c) for c in json.loads(input())])"
words = [sys.executable, "-I", "-c", code]
inputs = json.dumps([case[0] for case in cases])
done = subprocess.run(words, input=inputs, capture_output=True, text=True, timeout=3)
sys.exit(done.stdout.strip() != str([case[1] for case in cases]))
"""


def part_of(function: Function, bug: Bug) -> Part:
    """The part of the tasks that a pair belongs to under every seed: a fifth held out, three fifths recorded."""
    digest = hashlib.blake2b(f"{function.name} {bug}".encode(), digest_size=8).digest()
    remainder = int.from_bytes(digest, "big") % 5
    return "held out" if remainder == 0 else "recorded" if remainder < 4 else "practised"


def pairs_of(*parts: Part) -> list[tuple[Function, Bug]]:
    """All functions with each of their bugs that belong to the parts."""
    return [(function, bug) for function in FUNCTIONS for bug in bugs_of(function) if part_of(function, bug) in parts]


def edit(line: int, old: str, new: str) -> str:
    """The shell command that replaces a word of a line, which is counted from 1."""
    for character in "*[.":
        old = old.replace(character, f"\\{character}")
    return f"sed -i '{line}s|{old}|{new}|' {FILE}"


def repair(bug: Bug, names: str) -> str:
    """The shell command that repairs a bug."""
    return edit(bug.line + 1, named(bug.wrong, names), named(bug.right, names))


def mistaken(bug: Bug, names: str, rng: Random) -> str:
    """A command of a careless agent: another line, the words exchanged, or no repair at all."""
    wrong, right = named(bug.wrong, names), named(bug.right, names)
    mistake = rng.choice(("line", "words", "nothing"))
    if mistake == "line":
        return edit(bug.line + rng.choice((0, 2)), wrong, right)
    return edit(bug.line + 1, right, wrong) if mistake == "words" else SUBMIT


def commented(source: str, bug: Bug, names: str) -> str:
    """The file of a function, whose first line is a reviewer's comment: which word belongs where another one stands."""
    return named(f"# line {bug.line + 1}: {bug.right}, not {bug.wrong}\n{source}\n", names)


def test_of(function: Function) -> str:
    """A program that exits with 0 where the function in its folder gives the right results."""
    scope: dict[str, Any] = {}
    exec(named(function.source, "abc"), scope)
    # Arguments are copied by JSON: no result depends on what the function does to them.
    cases = [[args, scope[function.name](*json.loads(json.dumps(args)))] for args in function.inputs]
    return TEST.format(cases=json.dumps(cases), name=function.name, file=FILE)


def task_row(function: Function, bug: Bug, names: str) -> dict[str, str]:
    """The broken function, and the program that tests its repair."""
    return {"question": commented(function.broken(bug), bug, names), "answer": test_of(function)}


def recorded(function: Function, bug: Bug, names: str, command: str) -> list[dict[str, str]]:
    """The conversation in which the agent reads a function, runs the command and submits."""
    broken = commented(function.broken(bug), bug, names)
    turns = [(f"cat {FILE}", f"0\n{broken}"), (command, "0\n"), (SUBMIT, "")]
    turns = turns[:2] if command == SUBMIT else turns
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    for command, output in turns:
        messages.append({"role": "assistant", "content": f"```bash\n{command}\n```"})
        messages.append({"role": "user", "content": output})
    return messages[:-1]


def draws(pairs: list[tuple[Function, Bug]], rows: int, seed: str) -> Iterator[tuple[Function, Bug, str]]:
    """Pairs in turn, in an order and with names that the seed draws."""
    rng = Random(seed)
    pairs = rng.sample(pairs, len(pairs))
    for number in range(rows):
        yield (*pairs[number % len(pairs)], "".join(rng.sample(NAMES, 3)))


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=12_000, help="of training, and of recorded repairs")
    parser.add_argument("--mistakes", type=float, default=0.5, help="share of recorded repairs that are wrong")
    parser.add_argument("--held-out", type=int, default=100, help="rows")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    practised = pairs_of("practised")
    files: dict[str, list[Any]] = {
        "train": [task_row(*draw) for draw in draws(practised, options.rows, f"{options.seed}/train")],
        "test": [task_row(*draw) for draw in draws(pairs_of("held out"), options.held_out, "test")],
    }
    rng = Random(f"{options.seed}/mistakes")
    files["repairs"] = []
    for function, bug, names in draws(pairs_of("recorded"), options.rows, f"{options.seed}/repairs"):
        is_mistaken = rng.random() < options.mistakes
        command = mistaken(bug, names, rng) if is_mistaken else repair(bug, names)
        files["repairs"].append({"messages": recorded(function, bug, names, command)})
    for name, rows in files.items():
        (options.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
