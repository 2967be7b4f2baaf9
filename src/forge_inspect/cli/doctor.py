"""`forge doctor`: examine this machine, the hosts of a run, or a reward."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge.cli.subparsers import Subparsers

from . import Option, add_command

TEXT = "examine this machine, the hosts of a run, or a reward"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    options: list[Option] = [
        ("target", {"nargs": "?", "choices": ["machine", "cluster", "reward"], "default": "machine"}),
        ("reward", {"nargs": "?", "help": "of doctor reward: package.module:name"}),
        ("--hosts", {"help": "as cluster.hosts; default: FORGE_HOSTS"}),
        ("--folder", {"type": Path, "help": "that all hosts should see, such as runs"}),
        ("--data", {"help": "of doctor reward: rows for it, a file, folder or hub id"}),
        ("--prompt-field", {"help": "the column of the prompt; default: as dataset.prompt_field"}),
        ("--target-field", {"default": "answer", "help": "the column of the target, default: answer"}),
        ("--target-pattern", {"help": "as dataset.target_pattern, such as '#### (.*)'"}),
        ("--timeout", {"type": float, "default": 10.0, "help": "seconds of a call"}),
        ("--tests", {"type": Path, "help": "write a test for each finding to this file"}),
    ]
    add_command(commands, "doctor", TEXT, "cluster --hosts node1,node2 --folder runs", run, options)


def run(args: argparse.Namespace) -> None:
    """Print a report; exit code 1 if there is a problem."""
    if args.target == "reward":
        from importlib.metadata import entry_points

        for point in entry_points(group="forge.doctor", name="reward"):
            point.load()(args)
            return
        raise SystemExit("error: forge doctor reward needs the package forge_inspect")
    if args.reward or args.data or args.tests:
        raise SystemExit("error: --data and --tests are of forge doctor reward package.module:name")
    if args.target == "machine":
        if args.hosts or args.folder:
            raise SystemExit("error: --hosts and --folder are of forge doctor cluster")
        examine_machine()
        return
    # Imported here: `forge doctor` must also work where torch does not.
    from forge.runtime.controller.placement import machines_module

    try:
        diagnosis = machines_module().examine(args.hosts, args.folder)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    print(diagnosis.render())
    if diagnosis.problems:
        raise SystemExit(1)


def examine_machine() -> None:
    """Print a line for each finding about this machine."""
    from ..readiness import findings

    problems = 0
    for finding in findings():
        problems += bool(finding.problem)
        print(
            f"{finding.name:24} {finding.value}" + (f"\n{'':24} PROBLEM: {finding.problem}" if finding.problem else "")
        )
    if problems:
        raise SystemExit(1)
