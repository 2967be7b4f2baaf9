"""The commands of this package, and the function that adds each of them to the parser."""

import argparse
from collections.abc import Callable
from typing import Any

from forge.cli.subparsers import Subparsers

Option = tuple[str, dict[str, Any]]  # an argument's name and its settings


def add_command(
    commands: Subparsers,
    name: str,
    text: str,
    example: str,
    run: Callable[[argparse.Namespace], None],
    options: list[Option],
) -> None:
    """Add a command to the parser of `forge`. When it runs, invalid input ends the program with one line.

    Args:
        text: what the command does, for the help.
        example: its arguments in an example, after `forge NAME`.
        run: called with the parsed arguments.
    """
    parser = commands.add_parser(name, help=text, description=text, epilog=f"example: forge {name} {example}")
    for option, settings in options:
        parser.add_argument(option, **settings)

    def run_command(args: argparse.Namespace) -> None:
        try:
            run(args)
        except (ValueError, OSError, ImportError) as error:
            raise SystemExit(f"error: {error}") from None

    parser.set_defaults(run=run_command)
