"""`forge replay RUN`: a run computed again by its schedule."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge.cli.subparsers import Subparsers

TEXT = "compute a run again by its schedule, and compare each step with it, bit for bit"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    epilog = "example: forge replay runs/x --replicas 3"
    parser = commands.add_parser("replay", help=TEXT, description=TEXT, epilog=epilog)
    parser.add_argument("folder", type=Path, help="the folder of a run")
    parser.add_argument("--from", type=int, metavar="STEP", dest="start", help="begin with the checkpoint of this step")
    parser.add_argument("--until", type=int, metavar="STEP", help="the last step; by default that of the run")
    parser.add_argument("--replicas", type=int, help="generators; by default as many as the run had")
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting that differs: the step is named in which the runs part",
    )
    parser.add_argument("--name", help="of the new run, beside the first; by default its name with -replay")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Replay; exit code 1 if a step is not what the schedule says."""
    changes = []
    for text in args.change:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SystemExit(f"error: --change {text}: write KEY=VALUE, such as training.learning_rate=1e-4")
        changes.append((key, value))
    from forge.recipes.signals import end_at_signals
    from forge.runtime.controller import forked_processes

    end_at_signals()
    with forked_processes():
        from forge.recipes.launch import one_line_errors

        from ..replay import replay

        with one_line_errors():
            replay(
                args.folder,
                start=args.start,
                until=args.until,
                replicas=args.replicas,
                changes=changes,
                name=args.name,
            )
