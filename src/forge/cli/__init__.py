"""The `forge` command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from . import recipes, serve

# Commands of installed packages: the entry point names a module with `add_to(commands)`.
GROUP = "forge.commands"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands; bad input ends it with one line."""
    parser = argparse.ArgumentParser(prog="forge", description="RL post-training of language models")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    recipes.add_to(commands)
    serve.add_to(commands)
    for extension in entry_points(group=GROUP):
        try:
            extension.load().add_to(commands)
        except ImportError as error:  # an extra that is not installed
            commands.add_parser(extension.name, help=f"unavailable: {error}").set_defaults(run=_unavailable(error))
    args = parser.parse_args(argv)
    args.run(args)


def _unavailable(error: ImportError) -> Callable[[argparse.Namespace], None]:
    def run(_: argparse.Namespace) -> None:
        raise SystemExit(f"error: {error}")

    return run
