"""`forge clean`: remove the remains of killed runs on this host."""

import argparse

from .subparsers import Subparsers


def add_to(commands: Subparsers) -> None:
    """Add the command `forge clean` to the parser."""
    text = "remove shared memory and temporary folders of this user's dead processes on this host"
    commands.add_parser("clean", help=text, description=text, epilog="example: forge clean").set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    """Remove the folders that dead processes left, and print the path of each."""
    from ..system.files import escape_controls
    from ..system.scratch import sweep_folders

    for folder in sweep_folders():
        print(f"removed {escape_controls(folder)}")
