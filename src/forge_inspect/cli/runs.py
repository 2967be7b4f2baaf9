"""`forge runs`: the state of runs. `forge compare`: a run beside other runs, or beside the seeds of a reference."""

import argparse
import time
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command
from forge.system.files import escape_controls

MAX_DEPARTURES = 3  # that are explained: later ones follow from them
MAX_REASON = 60  # characters of the reason why a run ended, in a list
METRICS = [
    *("reward", "eval/accuracy", "train/loss", "train/entropy", "train/grad_norm", "policy_age"),
    *("groups_without_signal", "generation/truncated", "generation/completion_length", "seconds/step"),
]


def add_to(commands: Subparsers) -> None:
    """Add the commands `forge runs` and `forge compare` to the parser."""
    runs = {"nargs": "*", "type": Path, "default": [Path("runs")], "help": "runs, or folders with runs: runs/"}
    add_command(
        commands,
        "runs",
        "list runs with their state and last values; of a single run, also its alerts",
        "runs/",
        list_runs,
        [("folders", runs)],
    )
    add_command(
        commands,
        "compare",
        "compare a run with the reference seeds of its recipe, or runs with each other: settings and metrics",
        "runs/quickstart",
        compare_runs,
        [
            (
                "folders",
                {
                    "nargs": "+",
                    "type": Path,
                    "metavar": "RUN",
                    "help": "runs; or one, and a reference: a file or a name such as grpo/tiny; default: of its recipe",
                },
            ),
            (
                "--save",
                {"type": Path, "metavar": "FILE", "help": "write the runs, one a seed, to a file as a reference"},
            ),
            ("--metrics", {"nargs": "+", "default": METRICS, "metavar": "NAME", "help": "columns of metrics.jsonl"}),
        ],
    )


def list_runs(args: argparse.Namespace) -> None:
    """Print one line for each run, the most recently written one last."""
    # Local imports keep `forge --help` fast.
    from forge.observability.folder import ENDED, MARK
    from forge.observability.lines import Lines, finite_numbers
    from forge_inspect.alerts import folder_alerts, list_alerts
    from forge_inspect.runs import (
        find_runs,
        last_values,
        read_ending,
        read_metric_rows,
        read_settings,
        read_state,
    )

    if not (folders := find_runs(args.folders)):
        raise ValueError(f"no runs in {', '.join(map(str, args.folders))}")
    lines = []

    for folder in folders:
        # A damaged run is a line like any other, with a remark: the others are worth showing.
        last, config, damaged, first = {}, {}, "", None
        try:
            config = read_settings(folder)
            last = last_values(folder, ("reward", "eval/accuracy", "train/entropy"))
            # A run that never evaluated would be read from its start to its end in search of the first value.
            rows = map(finite_numbers, Lines(folder / MARK).read() if "eval/accuracy" in last else ())
            first = next((row["eval/accuracy"] for row in rows if "eval/accuracy" in row), None)
        except (ValueError, OSError) as error:
            damaged = f" (damaged: {error})"[:MAX_REASON]

        written = max((path.lstat().st_mtime for path in folder.glob("*.jsonl")), default=folder.stat().st_mtime)

        # The reason why it ended is shown for a run that neither continues nor is complete.
        reason = read_ending(folder)[:MAX_REASON] if read_state(folder) in ("failed", "stopped") else ""
        cells = [
            escape_controls(folder.name),
            escape_controls((reason or read_state(folder)) + damaged),
            f"{last.get('step', 0):g}/{config.get('training.steps') or '?'}",
            _format_number(last.get("reward")),
            "" if first is None else f"{first:.3f} -> {last['eval/accuracy']:.3f}",
            _format_number(last.get("train/entropy")),
            _format_age(time.time() - written),
        ]
        lines.append((written, cells))

    head = ["run", "state", "step", "reward", "held-out accuracy", "entropy", "written"]
    _print_table([head, *(cells for _, cells in sorted(lines))])

    # Details, if there is only one run.
    if len(folders) == 1:
        numbers = [] if damaged else read_metric_rows(folders[0])
        for alert in (*folder_alerts(folders[0]), *list_alerts(numbers, config)):
            print(f"alert: {alert}")
        if text := read_ending(folders[0]):
            print(f"{escape_controls(text)}; more in {escape_controls(folders[0] / ENDED)}")


def compare_runs(args: argparse.Namespace) -> None:
    """Print a table of the settings in which runs differ, and one of their metrics."""
    from forge.observability.folder import CONFIG
    from forge_inspect.reference import make_reference, write_reference
    from forge_inspect.runs import last_value, list_differences, read_metric_rows

    for folder in args.folders[:1] if len(args.folders) == 2 and not args.folders[1].is_dir() else args.folders:
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder} is not a run directory: it has no {CONFIG}")
    if args.save:
        return write_reference(make_reference(args.folders, args.save.stem), args.save)
    if len(args.folders) == 1 or not args.folders[1].is_dir():
        return compare_with_reference(*args.folders)

    names = [escape_controls(folder) for folder in args.folders]
    settings = list_differences(args.folders)
    numbers = [read_metric_rows(folder) for folder in args.folders]

    if settings:
        _print_table(
            [
                ["setting", *names],
                *([escape_controls(key), *map(escape_controls, values)] for key, values in settings.items()),
            ]
        )
    else:
        print("the settings are the same")

    for name, rows_of_run in zip(names, numbers, strict=True):
        if not rows_of_run:
            raise ValueError(f"run {name} has no step to compare")

    # Runs of different lengths are compared at the last step that all of them have.
    step = min(rows_of_run[-1]["step"] for rows_of_run in numbers)
    shared = [[row for row in rows_of_run if row["step"] <= step] for rows_of_run in numbers]

    # The difference is shown for two runs, if both have the metric.
    are_two = len(names) == 2
    lines = [[f"\nat step {step:g}", *names, *["difference"] * are_two]]
    for metric in args.metrics:
        values = [last_value(rows_of_run, metric) for rows_of_run in shared]
        present = [value for value in values if value is not None]
        if present:
            change = f"{present[1] - present[0]:+.4g}" if len(present) == 2 else ""
            lines.append([metric, *map(_format_number, values), *[change] * are_two])

    _print_table(lines)


def compare_with_reference(folder: Path, named: Path | None = None) -> None:
    """Print whether a run is within the bands of a reference, and how its settings differ.

    Args:
        named: a file or the name of a shipped reference; None: that of the run's recipe.
    """
    from forge_inspect.reference import (
        CAUSES,
        find_reference,
        read_reference,
        shipped_references,
    )
    from forge_inspect.runs import last_value, read_metric_rows, read_settings

    settings, rows = read_settings(folder), read_metric_rows(folder)
    names = {reference.name: reference for reference in shipped_references()}
    if named is None:
        reference = find_reference(settings)
    else:
        reference = names.get(str(named)) or (read_reference(named) if named.is_file() else None)
    if reference is None:
        raise ValueError(
            f"{named or folder} is {'no run, file or reference' if named else 'a run of none of the references'}: name "
            f"another run, a file of `forge compare --save`, or one of {', '.join(names)}"
        )

    step = int(min(rows[-1]["step"] if rows else 0, reference.steps))
    if step < 1:
        raise ValueError(f"run {folder} has no step to compare")
    origin = ", ".join(f"{key} {value}" for key, value in reference.provenance.items() if isinstance(value, str))
    print(f"beside {reference.seeds} seeds of {reference.name} ({origin})")
    if differences := reference.list_differences(settings):
        cells = [[escape_controls(cell) for cell in (key, *pair)] for key, pair in differences.items()]
        _print_table([["setting", "run", "reference"], *cells])

    departures = {departure.metric: departure for departure in reference.list_departures(rows)}
    shown_rows = [row for row in rows if row["step"] <= step]
    lines = [[f"at step {step}", "run", "lowest seed", "highest seed", ""]]
    for metric, bounds in reference.bands().items():
        if (last := last_value(shown_rows, metric)) is not None:
            # The last step that has the metric, which may be measured now and then only.
            low, high = (
                next(filter(lambda bound: bound is not None, reversed(bound[:step])), None) for bound in bounds
            )
            left = f"left at step {departures[metric].step}" if metric in departures else ""
            lines.append([metric, *map(_format_number, (last, low, high)), left])
    _print_table(lines)

    for departure in [*departures.values()][:MAX_DEPARTURES]:
        print(f"{departure}. Usual causes: {CAUSES.get(departure.metric, 'not known')}")
    if not departures:
        print(f"within the bands of {len(reference.curves)} metrics up to step {step}")


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _format_age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"


def _print_table(table: list[list[str]]) -> None:
    """Print rows of cells, with columns as wide as their longest cell."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
