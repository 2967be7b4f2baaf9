"""Conversations on the questions of a procedural task, as a file for a warm-up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from apps.toys.tasks import ProceduralTask

Converse = Callable[[str, Random], list[dict[str, Any]]]


def write_demonstrations(about: str, task: ProceduralTask, difficulty: tuple[int, int], converse: Converse) -> None:
    """A program that writes `{"messages": converse(question, rng)}` for training questions of the task, a line each, to
    the file that its command line names.

    Args:
        about: what it says of itself.
        difficulty: unless the command line says otherwise.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--difficulty", type=int, nargs=2, default=difficulty)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = Random(arguments.seed)
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    with arguments.path.open("w") as file:
        for index in range(arguments.rows):
            question = task.row(index, seed=arguments.seed, difficulty=arguments.difficulty).question
            file.write(json.dumps({"messages": converse(question, rng)}) + "\n")
