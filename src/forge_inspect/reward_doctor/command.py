"""`forge doctor reward`."""

from __future__ import annotations

import argparse

from forge.data.files import open_rows
from forge.data.prompts import PromptFormat, plain_columns, with_ground_truth
from forge.rewards.rules import load_reward

from .calls import Case
from .examine import ROWS, examine
from .findings import test_file


def examine_reward(args: argparse.Namespace) -> None:
    """Print what was found about a reward."""
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


def _read_cases(args: argparse.Namespace) -> list[Case]:
    """The first rows of the data that can be read. ValueError, OSError: there are none."""
    target_field = None if args.target_field in ("null", "none", "") else args.target_field
    form = PromptFormat(None, "{question}", target_field, args.prompt_field, args.target_pattern)
    cases = []
    for row in map(with_ground_truth, open_rows(args.data, split="train")):
        prompt, target = form.render(row)
        cases.append(Case(prompt, target or None, plain_columns(row, None, [])))
        if len(cases) == ROWS:
            break
    return cases
