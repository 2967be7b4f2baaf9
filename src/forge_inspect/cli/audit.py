"""`forge audit RUN`: what became of each prompt and token of a run."""

import argparse
import json
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command
from forge.system.files import escape_controls
from forge.system.trial import try_in_child


def add_to(commands: Subparsers) -> None:
    """Add the command `forge audit` to the parser."""
    add_command(
        commands,
        "audit",
        "count what became of each prompt and token of a run, from its files only",
        "runs/x --json",
        run,
        [
            ("folder", {"type": Path, "help": "the folder of a run"}),
            ("--json", {"action": "store_true", "help": "print JSON"}),
        ],
    )


def run(args: argparse.Namespace) -> None:
    """Print the audit; exit code 1 if there is a fault."""
    text = try_in_child("forge_inspect.audit:print_audit", str(args.folder), subject=str(args.folder), seconds=3600)
    result = json.loads(text)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"{result['steps']} steps")
        for name, count in result["counts"].items():
            print(f"{name:<46} {count}")
        for fault in result["faults"]:
            print(f"fault: {escape_controls(fault)}")
        if result["is_sound"]:
            print("no fault: every prompt was trained once, dropped for a counted reason, or in flight at the end")

    if not result["is_sound"]:
        raise SystemExit(1)
