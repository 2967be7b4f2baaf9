"""`forge completion bash`: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse

from forge.cli.subparsers import Subparsers

TEXT = "print a completion script for a shell; needs shtab"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "completion",
        help=TEXT,
        description=TEXT,
        epilog='example: forge completion bash, used as eval "$(forge completion bash)"',
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the completion script."""
    try:
        import shtab
    except ImportError as error:
        raise SystemExit(f"error: {error}: pip install shtab") from error
    from forge.cli import make_parser

    parser = make_parser()
    complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, args.shell))


def complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Complete arguments that take free text to files, in all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                complete_files(command, files)
        elif action.nargs != 0 and action.choices is None and action.type not in (int, float):
            action.complete = files  # type: ignore[attr-defined]
