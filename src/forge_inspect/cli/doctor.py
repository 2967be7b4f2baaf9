"""`forge doctor`: examine this machine, the hosts of a run, or a reward."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge.cli.subparsers import Subparsers

TEXT = "examine this machine, the hosts of a run, or a reward"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor", help=TEXT, description=TEXT, epilog="example: forge doctor cluster --hosts node1,node2 --folder runs"
    )
    parser.add_argument("target", nargs="?", choices=["machine", "cluster", "reward"], default="machine")
    parser.add_argument("reward", nargs="?", help="of doctor reward: package.module:name")
    parser.add_argument("--hosts", help="as cluster.hosts; default: FORGE_HOSTS")
    parser.add_argument("--folder", type=Path, help="that all hosts should see, such as runs")
    parser.add_argument("--data", help="of doctor reward: rows for it, a file, folder or hub id")
    parser.add_argument("--prompt-field", help="the column of the prompt; default: as dataset.prompt_field")
    parser.add_argument("--target-field", default="answer", help="the column of the target, default: answer")
    parser.add_argument("--target-pattern", help="as dataset.target_pattern, such as '#### (.*)'")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds of a call")
    parser.add_argument("--tests", type=Path, help="write a test for each finding to this file")
    parser.set_defaults(run=run)


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
