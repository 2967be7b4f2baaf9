"""`forge weaver`: score, fit, predict and distil, with a file after each step."""

import argparse
import asyncio
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forge_weaver  # its names are imported on first use
from forge.cli.subparsers import Option, Subparsers, add_command

# Imports within the steps take seconds.

COLUMN = "weaver"  # holds the probabilities
SCORES = ("scores", {"help": ".npz"})
AGGREGATOR = ("--aggregator", {"required": True, "help": "what fit left: a .npz file, or a folder"})


def add_to(commands: Subparsers) -> None:
    """Add `weaver` and its steps, such as `forge weaver fit`, to the commands of `forge`."""
    weaver = commands.add_parser(
        "weaver",
        help="make one verifier of many weak ones",
        description="Make one verifier of many weak ones, without labels or with a handful. "
        "apps/weaver does all of it by one configuration.",
        epilog="example: forge weaver fit scores.npz --out aggregator.npz",
    )
    steps = weaver.add_subparsers(dest="step", required=True, metavar="STEP")

    for name, (run, summary, example, options) in STEPS.items():
        add_command(
            steps,
            name,
            summary,
            example,
            partial(_run_quietly, run),
            options,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )


def _run_quietly(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are in the report
        run(args)


def _score_problems(args: argparse.Namespace) -> None:
    from .table import check_path

    problems = forge_weaver.read_problems(args.responses)
    verifiers = _read_verifiers(args.verifiers)
    if COLUMN in verifiers.names:
        raise ValueError(f"invalid verifier name {COLUMN}: predict adds a column of that name; choose another")
    check_path(args.out)

    # Names and outputs are checked before any model is loaded.
    panel = verifiers.panel()

    async def score() -> Any:
        try:
            return await forge_weaver.score_table(panel, problems, concurrency=args.concurrency)
        finally:
            await panel.close()

    start = time.perf_counter()
    asyncio.run(score()).save(args.out)
    for reason, count in panel.missing.most_common():
        print(f"{count} x missing, {reason}")
    print(f"all of it took {time.perf_counter() - start:.1f} s\nwritten: {args.out}")


def _fit_table(args: argparse.Namespace) -> None:
    table = _read_scores(args.scores)
    verifiers = None if args.verifiers is None else _read_verifiers(args.verifiers)

    # All outputs are checked before the fit, which may take minutes.
    if args.out.endswith(".npz") == (verifiers is not None):
        raise ValueError("--out must be a directory with --verifiers, and a .npz file without")
    if not Path(args.out).absolute().parent.is_dir():
        raise FileNotFoundError(f"cannot write {args.out}: the directory {Path(args.out).parent} does not exist")

    # An ensemble can only be used with the verifiers that it was fitted on.
    if verifiers is not None and (missing := [name for name in table.verifiers if name not in verifiers.names]):
        raise ValueError(f"{args.verifiers} must have all verifiers of the score table, but lacks {', '.join(missing)}")
    aggregator = forge_weaver.fit_table(
        table, args.method, class_balance=args.class_balance, one_right=args.one_right, labelled=args.labelled
    )
    print(aggregator.report)
    if verifiers is not None:
        forge_weaver.save_ensemble(args.out, verifiers, aggregator)
    else:
        aggregator.save(args.out)

    print(f"written: {args.out}")


def _predict_table(args: argparse.Namespace) -> None:
    from .table import check_path

    check_path(args.out)
    table, aggregator = _read_scores(args.scores), forge_weaver.load(args.aggregator)
    table.with_verifier(COLUMN, aggregator.predict_proba(table.select(aggregator.verifiers))).save(args.out)
    print(f"written: {args.out}")


def _distil_ensemble(args: argparse.Namespace) -> None:
    from forge.models import resolve_model

    from .distil import distil

    table, aggregator = forge_weaver.ScoreTable.load(args.scores), forge_weaver.load(args.aggregator)
    report = distil(
        table,
        aggregator.predict_proba(table.select(aggregator.verifiers)),
        resolve_model(args.model),
        args.out,
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
        say=print,
        max_tokens=args.max_tokens,
        as_pair=not args.joined,
    )
    print(report)


def _read_verifiers(path: str) -> Any:
    """Return the configuration of verifiers in a YAML file.

    Raises:
        ValueError, FileNotFoundError: the file or a setting is invalid, or a file or model named in it is missing.
    """
    from forge.config import read
    from forge_verifiers.config import VerifiersConfig

    verifiers = read(VerifiersConfig, Path(path))
    verifiers.check_sources()
    return verifiers


def _read_scores(path: str) -> Any:
    """Return the score table in a .npz file. ValueError: it already has the column that `predict` adds."""
    table = forge_weaver.ScoreTable.load(path)
    if COLUMN in table.verifiers:
        raise ValueError(f"{path} has a column {COLUMN}, which predict adds: remove it from the scores")
    return table


# By name: the function that runs the step, its summary, an example and the options. `apps/weaver` runs all steps.
STEPS: dict[str, tuple[Any, str, str, list[Option]]] = {
    "score": (
        _score_problems,
        "score responses by verifiers",
        "responses.jsonl --verifiers verifiers.yaml --out scores.npz",
        [
            ("responses", {"help": "JSON lines: prompt, responses and, where known, target, labels, answers"}),
            ("--verifiers", {"required": True, "help": "YAML file that says which, see docs/configuration.md"}),
            ("--out", {"required": True, "help": "scores, .npz"}),
            ("--concurrency", {"type": int, "default": 16, "help": "problems that are scored at once"}),
        ],
    ),
    "fit": (
        _fit_table,
        "put the scores together",
        "scores.npz --out ensemble --verifiers verifiers.yaml",
        [
            SCORES,
            ("--method", {"default": "auto", "help": "auto, or another of docs/weaver.md"}),
            ("--class-balance", {"type": float, "help": "share of right responses, where it is known"}),
            ("--one-right", {"action": "store_true", "help": "exactly one response of each problem is right"}),
            (
                "--labelled",
                {"type": int, "default": 0, "help": "let it see the labels of the first that many problems"},
            ),
            ("--out", {"required": True, "help": "the aggregator, .npz; with --verifiers the folder of an ensemble"}),
            ("--verifiers", {"help": "YAML file of the verifiers that gave the scores"}),
        ],
    ),
    "predict": (
        _predict_table,
        "add the probability of being right as one more column",
        "scores.npz --aggregator ensemble --out probabilities.npz",
        [SCORES, AGGREGATOR, ("--out", {"required": True, "help": f".npz, with a column `{COLUMN}`"})],
    ),
    "distil": (
        _distil_ensemble,
        "train one model to say what the ensemble says",
        "scores.npz --aggregator ensemble --model ENCODER --out distilled",
        [
            ("scores", {"help": ".npz, with prompts and responses"}),
            AGGREGATOR,
            ("--model", {"required": True, "help": "encoder: folder or hub id"}),
            ("--out", {"required": True, "help": "folder"}),
            ("--epochs", {"type": int, "default": 4, "help": "passes over the responses"}),
            ("--batch-size", {"type": int, "default": 64, "help": "responses a step"}),
            ("--learning-rate", {"type": float, "default": 5e-5, "help": "highest of the schedule"}),
            ("--max-tokens", {"type": int, "help": "of prompt and response; the model's own if not given"}),
            ("--joined", {"action": "store_true", "help": "one text, ended by eos, instead of the tokenizer's pair"}),
            ("--seed", {"type": int, "default": 0, "help": "of the division of problems and of training"}),
        ],
    ),
}
