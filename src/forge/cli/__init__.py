"""The `forge` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from . import clean, doctor, launch, recipes, runs, serve, table, watch, worker

# Commands of installed packages: the entry point names a module with `add_to(commands)`.
GROUP = "forge.commands"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands; bad input ends it with one line."""
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())  # as with `python -m`: a reward of one's own is named by its module
    parser = argparse.ArgumentParser(prog="forge", description="RL post-training of language models")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    recipes.add_to(commands)
    serve.add_to(commands)
    clean.add_to(commands)
    worker.add_to(commands)
    doctor.add_to(commands)
    launch.add_to(commands)
    table.add_to(commands)
    runs.add_to(commands)
    watch.add_to(commands)
    words = sys.argv[1:] if argv is None else argv
    # Those packages take seconds to import. A set: an environment that was installed under the former name, torchforge,
    # has each of ours twice.
    points = entry_points(group=GROUP) if not words or words[0] not in commands.choices else ()
    for name, module in sorted({(point.name, point.value) for point in points}):
        try:
            import_module(module).add_to(commands)
        except ImportError as error:  # an extra that is not installed
            commands.add_parser(name, help=f"unavailable: {error}").set_defaults(run=_unavailable(error))
    args = parser.parse_args(argv)
    args.run(args)


def _unavailable(error: ImportError) -> Callable[[argparse.Namespace], None]:
    def run(_: argparse.Namespace) -> None:
        raise SystemExit(f"error: {error}")

    return run
