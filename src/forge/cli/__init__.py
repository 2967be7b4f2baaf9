"""The `forge` command: one program with a module for each subcommand."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from ..system.files import fill_standard_files
from . import clean, recipes

MODULES = (recipes, clean)
# Commands of extensions: the entry point names a module with `add_to(commands)`.
GROUP = "forge.commands"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands; bad input ends it with one line."""
    fill_standard_files()
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise SystemExit("error: the working folder was removed: change to another one") from None

    # As with `python -m`: a reward of this folder is named by its module.
    if not {"", folder} & {*sys.path}:
        sys.path.insert(0, folder)
    words = sys.argv[1:] if argv is None else argv
    args = make_parser(words).parse_args(argv)

    try:
        args.run(args)
    except KeyboardInterrupt:  # of a command without handlers, or a second one
        print("forge: SIGINT: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


class _Version(argparse.Action):
    """The option --version, which reads the version only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .. import __version__

        print(f"forge {__version__}")
        parser.exit()


def make_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Create the parser of all commands.

    Args:
        words: the command line; extensions are omitted whose command it does not call.
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

    # Only the command that is called, if it is one of these: importing all of them takes seconds.
    points = {point.name: point.value for point in entry_points(group=GROUP)}
    if words and (words[0] in points or (words[0] in commands.choices)):
        points = {words[0]: points[words[0]]} if words[0] in points else {}
    for name, path in sorted(points.items()):
        try:
            import_module(path).add_to(commands)
        except ImportError as error:  # an optional package is missing
            commands.add_parser(name, help=f"unavailable: {error}").set_defaults(run=_make_unavailable(error))

    return parser


def _make_unavailable(error: ImportError) -> Callable[[argparse.Namespace], None]:
    def raise_error(_: argparse.Namespace) -> None:
        raise SystemExit(f"error: {error}")

    return raise_error
