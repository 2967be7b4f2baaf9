"""`forge convert upstream FILE`: a configuration of Meta's torchforge with the keys of this library."""

import argparse
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command


def add_to(commands: Subparsers) -> None:
    """Add the command `forge convert` to the parser."""
    add_command(
        commands,
        "convert",
        "a configuration file of another library, printed with the keys of this one",
        "upstream TORCHFORGE/apps/grpo/qwen3_1_7b.yaml",
        run,
        [
            ("library", {"choices": ["upstream"], "help": "upstream: Meta's torchforge"}),
            ("file", {"type": Path, "help": "its YAML file"}),
        ],
    )


def run(args: argparse.Namespace) -> None:
    """Print the converted YAML, with a comment for each key without an equivalent; a bad file is a one-line error."""
    # Imported here, as other commands do not need it.
    from forge.system.trial import try_in_child

    print(try_in_child(f"{__name__}:print_converted", str(args.file), subject=str(args.file), seconds=10), end="")


def print_converted(file: str) -> None:
    """Print the YAML of a converted file; to be called in a child process, as the file may be somebody else's."""
    from .torchforge_files import convert_config, read_upstream

    path = Path(file)
    print(convert_config(read_upstream(path), path.stem).text(path.name), end="")
