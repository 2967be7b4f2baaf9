"""The type of what commands are added to, and the function that adds one."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

# argparse has no public name for the class.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Option = tuple[str, dict[str, Any]]  # an argument's name and its settings


def add_command(
    commands: Subparsers,
    name: str,
    text: str,
    example: str,
    run: Callable[[argparse.Namespace], None],
    options: list[Option],
    **settings: Any,
) -> None:
    """Add a command to the parser of `forge`. When it runs, invalid input ends the program with one line.

    Args:
        text: what the command does, for the help.
        example: its arguments in an example, after `forge NAME`.
        run: called with the parsed arguments.
        settings: further arguments of `add_parser`.
    """
    parser = commands.add_parser(name, help=text, **{"description": text, **settings})
    parser.epilog = f"example: {parser.prog} {example}"
    for option, option_settings in options:
        parser.add_argument(option, **option_settings)

    def run_command(args: argparse.Namespace) -> None:
        try:
            run(args)
            sys.stdout.flush()
        except BrokenPipeError:  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (ValueError, OSError, ImportError) as error:
            raise SystemExit(f"error: {' '.join(str(error).split())}") from None

    parser.set_defaults(run=run_command)
