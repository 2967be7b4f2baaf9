"""`forge simulate FILE`: a run in virtual time, and sweeps of its settings."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .table import Subparsers

if TYPE_CHECKING:
    from ..recipes.simulate import SimulatedRun, SimulationSettings

SIMULATE = "simulate a run in virtual time: step seconds, utilisation, policy ages, waste, failures"
EXAMPLE = "example: forge simulate --run runs/quickstart --sweep max_policy_age=0,1,2,4 --plot ages.svg"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("simulate", help=SIMULATE, description=SIMULATE, epilog=EXAMPLE)
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes a simulation."""
    parser.add_argument("file", nargs="?", type=Path, help="YAML with settings and durations, see docs/simulate.md")
    parser.add_argument(
        "--run",
        dest="folders",
        action="append",
        default=[],
        type=Path,
        metavar="RUN",
        help="a real run in lock-step that durations are measured in, in place of a file; several tell more apart",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value of a setting")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE", help="values of a setting, one line each"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="simulate each setting N times: means")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture: .svg, .png (needs matplotlib)")


def run(args: argparse.Namespace) -> None:
    """Simulate, and print the table."""
    from ..config import ConfigError
    from ..recipes.simulate import simulate
    from ..recipes.simulate.clock import NothingLeft
    from ..recipes.simulate.plot import bars, write_plot
    from ..recipes.simulate.results import table

    if args.seeds < 1:
        raise SystemExit(f"error: --seeds {args.seeds}: at least 1")
    lines: list[tuple[dict[str, object], list[SimulatedRun]]] = []
    try:
        for swept, settings in _swept(args):
            # Seeds follow one another, so that every line has the same ones.
            seeds = range(settings.seed, settings.seed + args.seeds)
            lines.append((swept, [simulate(settings.model_copy(update={"seed": seed})) for seed in seeds]))
        print(table(lines))
        if len(lines) > 1:
            print(f"\n{bars(lines)}")
        for ending in sorted({result.ending for _, results in lines for result in results if result.ending}):
            print(f"ended early: {ending}")
        if args.plot is not None:
            write_plot(lines, args.plot)
            print(f"written: {args.plot}")
    except (ConfigError, ImportError, NothingLeft, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


def _swept(args: argparse.Namespace) -> list[tuple[dict[str, object], SimulationSettings]]:
    """The settings of each line of the table, with the values that differ between them."""
    from ..config import ConfigError, build
    from ..config.sections import bundled, read_file, to_dict
    from ..recipes.simulate import SimulationSettings
    from ..recipes.simulate.traces import settings_of_runs

    if (args.file is None) == (not args.folders):
        raise ConfigError("give a YAML file with durations, or a run to measure them in: --run runs/quickstart")
    values = to_dict(settings_of_runs(args.folders)) if args.folders else read_file(bundled(args.file))
    for text in args.set:
        name, value = _assigned(text)
        _set(values, name, value)
    sweeps = [_assigned(text) for text in args.sweep]
    choices = [[(name, value) for value in _listed(listed)] for name, listed in sweeps]
    lines: list[tuple[dict[str, object], SimulationSettings]] = []
    # Every combination of the swept values is a line.
    for combination in itertools.product(*choices):
        for name, value in combination:
            _set(values, name, value)
        swept: dict[str, object] = dict(combination)
        lines.append((swept, build(SimulationSettings, values)))
    return lines


def _assigned(text: str) -> tuple[str, str]:
    from ..config import ConfigError

    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ConfigError(f"did not understand {text!r}: write KEY=VALUE, as max_policy_age=1")
    return name, value


def _listed(text: str) -> list[str]:
    """The values of a sweep, which commas separate."""
    return [value for value in text.split(",") if value]


def _set(values: dict[str, Any], name: str, text: str) -> None:
    """Set a dotted name in plain data."""
    import yaml

    from ..config import ConfigError

    *sections, key = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{section} of {name} is not a section")
    value = yaml.safe_load(text)
    # YAML reads 1e5 as text.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = text
    values[key] = value
