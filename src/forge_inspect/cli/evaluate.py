"""`forge eval MODEL --suite CONFIG`: a model on the held-out problems of a configuration."""

import argparse
import json
from pathlib import Path

from forge.cli.subparsers import Subparsers, add_command


def add_to(commands: Subparsers) -> None:
    """Add the command `forge eval` to the parser."""
    add_command(
        commands,
        "eval",
        "evaluate a model on the held-out problems of a recipe's configuration, eval and eval.sets",
        "runs/x/model --suite runs/x/config.yaml",
        run,
        [
            ("model", {"help": "folder or hub id"}),
            ("--suite", {"required": True, "help": "YAML file of an RL recipe, or config.yaml of a run"}),
            ("--answers", {"type": Path, "help": "write the answers to this file, as JSON lines"}),
            ("--json", {"action": "store_true", "help": "print the metrics as JSON"}),
            ("overrides", {"nargs": "*", "help": "-- --section.key VALUE"}),
        ],
    )


def run(args: argparse.Namespace) -> None:
    """Evaluate the model, and print the metrics."""
    from forge.config.arguments import load
    from forge.recipes.rl_config import RLConfig
    from forge.runtime.controller import forked_processes

    # The given model replaces the configuration's, which may have been made from scratch.
    cfg = load(RLConfig, ["--config", args.suite, "--model", args.model, "--from_scratch", "null", *args.overrides])
    if args.answers is not None:
        args.answers.touch()  # before the work, which may take an hour

    # The server imports its libraries while this process imports the recipe.
    with forked_processes():
        from ..suite import evaluate_suite

        metrics = evaluate_suite(cfg, args.answers)

    print(json.dumps(metrics) if args.json else format_table(metrics))


def format_table(metrics: dict[str, float]) -> str:
    """Return a line for each metric; the metric NAME/margin is half the 95 % interval of NAME, after ±.

    >>> format_table({"eval/accuracy": 0.5, "eval/accuracy/margin": 0.1})
    'eval/accuracy                    0.500 ± 0.100'
    """
    lines = []
    for name, value in metrics.items():
        if not name.endswith("/margin"):
            half = metrics.get(f"{name}/margin")
            lines.append(f"{name:<32} {value:.3f}" + ("" if half is None else f" ± {half:.3f}"))
    return "\n".join(lines)
