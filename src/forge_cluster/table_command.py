"""`forge table runs/x-*`: the results of several runs in one table."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge.cli.subparsers import Subparsers

TEXT = "one table of several runs, for example of a sweep or of seeds"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "table", help=TEXT, description=TEXT, epilog="example: forge table runs/seed-0 runs/seed-1 --metric reward"
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--metric", default="eval/accuracy", help="a column of metrics.jsonl")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table."""
    from .sweep import format_table

    print(format_table([folder for folder in args.runs if folder.is_dir()], args.metric))
