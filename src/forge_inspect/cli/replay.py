"""`forge replay RUN`: a run computed again by its schedule."""

import argparse
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command


def add_to(commands: Subparsers) -> None:
    """Add the command `forge replay` to the parser."""
    add_command(
        commands,
        "replay",
        "compute a run again by its schedule, and compare each step with it, bit for bit",
        "runs/x --replicas 3",
        run,
        [
            ("folder", {"type": Path, "help": "the folder of a run"}),
            ("--until", {"type": int, "metavar": "STEP", "help": "the last step; default: the run's"}),
            ("--replicas", {"type": int, "help": "generators; by default as many as the run had"}),
        ],
    )


def run(args: argparse.Namespace) -> None:
    """Replay a run; exit code 1 if a step differs from its schedule."""
    from forge.recipes.signals import end_at_signals
    from forge.runtime.controller import forked_processes

    end_at_signals()
    with forked_processes():
        from forge.recipes.launch import one_line_errors

        from ..replay import replay_run

        with one_line_errors():
            replay_run(args.folder, until=args.until, replicas=args.replicas)
