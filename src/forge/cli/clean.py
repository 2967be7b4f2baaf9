"""`forge clean`: remove what killed runs left on this host."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    text = "remove shared memory and temporary folders of this user's dead processes on this host"
    parser = commands.add_parser("clean", help=text, description=text, epilog="example: forge clean")
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    """Print each folder that was removed."""
    from ..system.files import printable
    from ..system.scratch import sweep

    for folder in sweep():
        print(f"removed {printable(folder)}")
