"""`forge mismatch RUN`: why the log-probabilities of engine and trainer differ."""

import argparse
import sys
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command


def add_to(commands: Subparsers) -> None:
    """Add the command `forge mismatch` to the parser."""
    add_command(
        commands,
        "mismatch",
        "name the component in which engine and trainer differ, on a recorded batch of a run",
        "runs/x",
        run,
        [
            ("folder", {"type": Path, "metavar": "RUN", "help": "the folder of a run"}),
            ("--step", {"type": int, "help": "whose batch; default: the newest that can be compared"}),
            ("--json", {"action": "store_true", "help": "print JSON"}),
        ],
    )


def run(args: argparse.Namespace) -> None:
    """Compare engine and trainer, and print and write the result; exit code 1 if they differ, 2 for invalid input."""
    from forge.models.find import quiet_loading
    from forge.system.files import write_atomic

    from ..alerts import MISMATCH
    from ..mismatch import compare_batch

    try:
        with quiet_loading():
            result = compare_batch(args.folder, step=args.step)
    except (ValueError, ImportError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None

    # `forge watch` and `forge runs` show the result from this file.
    write_atomic(args.folder / MISMATCH, result.json() + "\n")
    if args.json:
        print(result.json())
    else:
        print(f"{result.tokens} tokens of step {result.step}, sampled by version {result.version}")
        width = max(len(f"{link.first} | {link.second}") for link in result.links)
        for link in result.links:
            mark = "" if link.agrees else "  <- differs"
            print(f"{f'{link.first} | {link.second}':<{width}}  {link.mean:.1e} nats{mark}")
        remarks = [*(f"fault: {fault}" for fault in result.faults), *(f"note: {note}" for note in result.notes)]
        print("\n".join([*remarks, *([f"no fault: {result.sentence}"] if result.is_sound else [])]))
    if not result.is_sound:
        raise SystemExit(1)
