"""`forge table runs/x-*`: the results of several runs in one table."""

import argparse
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from forge.cli.subparsers import Subparsers
from forge.system.files import escape_controls

TEXT = "one table of several runs, for example of a sweep or of seeds"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "table", help=TEXT, description=TEXT, epilog="example: forge table runs/seed-0 runs/seed-1 --metric reward"
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--metric", default="eval/accuracy", help="a column of metrics.jsonl")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print a table of the given runs; paths that are no folders are left out."""
    print(format_table([folder for folder in args.runs if folder.is_dir()], args.metric))


def format_table(folders: Sequence[Path], metric: str = "eval/accuracy") -> str:
    """Return a table in Markdown: for each run its state, last step, and the first, last and best value of a metric.

    Runs whose names differ only in the seed have one more row, with the mean of their last values.
    """
    from forge.observability.lines import read_rows  # imported here to keep `forge --help` fast

    rows: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    for folder in folders:
        steps = read_rows(folder / "metrics.jsonl")
        values = [row[metric] for row in steps if metric in row]
        last_step = max((row.get("step", 0) for row in steps), default=0)
        state = "finished" if (folder / "finished").exists() else "unfinished"
        numbers = [f"{value:.3f}" for value in (values[0], values[-1], max(values))] if values else ["", "", ""]
        rows.append([escape_controls(folder.name).replace("|", "\\|"), state, f"{last_step:g}", *numbers])
        if values:
            # Without the seed, runs of the same settings have the same name.
            groups.setdefault(re.sub(r"-?seed\d+", "", rows[-1][0]), []).append(values[-1])

    for name, last in groups.items():
        if len(last) > 1:
            spread = f"{statistics.mean(last):.3f} ± {statistics.stdev(last):.3f}"
            rows.append([f"{name}: {len(last)} seeds", "", "", "", spread, ""])

    head = ["run", "state", "step", f"{metric} first", "last", "best"]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
