"""`forge doctor`: examine this machine, the hosts of a run, or a reward."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .table import Subparsers

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
        examine_reward(args)
        return
    if args.reward or args.data or args.tests:
        raise SystemExit("error: --data and --tests are of forge doctor reward package.module:name")
    if args.target == "machine":
        if args.hosts or args.folder:
            raise SystemExit("error: --hosts and --folder are of forge doctor cluster")
        examine_machine()
        return
    # Imported here: `forge doctor` must also work where torch does not.
    from ..runtime.controller.placement import machines_module

    try:
        diagnosis = machines_module().examine(args.hosts, args.folder)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    print(diagnosis.render())
    if diagnosis.problems:
        raise SystemExit(1)


def examine_reward(args: argparse.Namespace) -> None:
    """Print what was found about a reward."""
    from ..rewards.doctor import examine
    from ..rewards.doctor.findings import test_file
    from ..rewards.rules import load_reward

    if not args.reward or not args.data:
        raise SystemExit("error: which reward, on which rows? forge doctor reward package.module:name --data FILE")
    if not args.timeout > 0:
        raise SystemExit(f"error: --timeout must be above 0, got {args.timeout:g}")
    try:
        load_reward(args.reward)  # a wrong name is one line here, and a traceback in its process
        cases = _read_cases(args)
        result = examine(args.reward, cases, limit=args.timeout)
        if args.tests is not None:
            serious = [finding for finding in result.findings if finding.severity != "note"]
            args.tests.write_text(test_file(args.reward, serious, args.timeout))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from None
    right, wrong = ("unknown" if value is None else f"{value:.3f}" for value in (result.right, result.wrong))
    print(f"{result.calls} calls on {result.rows} rows: right answers earn {right}, answers of other rows {wrong};")
    print(f"a call takes {1000 * result.median_seconds:.1f} ms, the slowest {result.slowest:.2f} s")
    for finding in result.findings:
        print(finding.line)
    if not result.findings:
        print("nothing was found")
    if result.has_fault:
        raise SystemExit(1)


def _read_cases(args: argparse.Namespace) -> list[Any]:
    """The first rows of the data that can be read. ValueError, OSError: there are none."""
    from ..data.files import open_rows
    from ..data.prompts import PromptFormat, plain_columns, with_ground_truth
    from ..rewards.doctor.calls import Case
    from ..rewards.doctor.examine import ROWS

    target_field = None if args.target_field in ("null", "none", "") else args.target_field
    form = PromptFormat(None, "{question}", target_field, args.prompt_field, args.target_pattern)
    cases = []
    for row in map(with_ground_truth, open_rows(args.data, split="train")):
        prompt, target = form.render(row)
        cases.append(Case(prompt, target or None, plain_columns(row, None, [])))
        if len(cases) == ROWS:
            break
    return cases


def examine_machine() -> None:
    """Print a line for each finding about this machine."""
    from .readiness import findings

    problems = 0
    for finding in findings():
        problems += bool(finding.problem)
        print(
            f"{finding.name:24} {finding.value}" + (f"\n{'':24} PROBLEM: {finding.problem}" if finding.problem else "")
        )
    if problems:
        raise SystemExit(1)
