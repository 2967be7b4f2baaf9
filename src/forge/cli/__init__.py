"""The `forge` command, with a module for each group of subcommands."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

from ..system.files import fill_standard_files
from . import clean, recipes

MODULES = (recipes, clean)
# Commands of extensions: the entry point names a module with `add_to(commands)`.
GROUP = "forge.commands"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the command line names; bad input ends the program with one line.

    Args:
        argv: arguments of the command line; None: the program's.
    """
    fill_standard_files()
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise SystemExit("error: the working directory was removed: change to another directory") from None

    # Modules in the working folder can be named, such as a user's rewards, as with `python -m`.
    if not {"", folder} & {*sys.path}:
        sys.path.insert(0, folder)
    args = make_parser(sys.argv[1:] if argv is None else argv).parse_args(argv)

    try:
        args.run(args)
    except KeyboardInterrupt:  # commands that handle SIGINT raise it only at the second
        print("forge: SIGINT: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


class _Version(argparse.Action):
    """The option --version, which looks up the version only when it is used, since that takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .. import __version__

        print(f"forge {__version__}")
        parser.exit()


def make_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the argument parser of all `forge` commands.

    Args:
        words: the command line. If it calls a known command, the commands of other extensions are omitted.
    """
    parser = argparse.ArgumentParser(
        prog="forge",
        description="RL post-training of language models",
        epilog="example: forge train apps/grpo/gsm8k.yaml; forge COMMAND --help has an example of each command",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in MODULES:
        module.add_to(commands)

    # If a known command is called, only its module is imported: importing all extensions' takes seconds.
    points = {point.name: point.value for point in entry_points(group=GROUP)}
    called = words[0] if words else None
    if called in points or called in commands.choices:
        points = {name: path for name, path in points.items() if name == called}

    for name, path in sorted(points.items()):
        try:
            import_module(path).add_to(commands)
        except ImportError as error:  # an optional package is missing
            unavailable = commands.add_parser(name, help=f"unavailable: {error}")
            unavailable.set_defaults(run=lambda _, text=f"error: {error}": sys.exit(text))

    return parser
