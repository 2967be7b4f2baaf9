"""The `forge` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import entry_points

from . import serve

# Commands of installed packages: the entry point names a module with `add_to(commands)`.
GROUP = "forge.commands"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands; bad input ends it with one line."""
    parser = argparse.ArgumentParser(prog="forge", description="RL post-training of language models")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_to(commands)
    for extension in entry_points(group=GROUP):
        extension.load().add_to(commands)
    args = parser.parse_args(argv)
    args.run(args)
