"""`forge weaver`: score, fit, predict and distil, with a file after each step."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

# Imports within the steps take seconds.

COLUMN = "weaver"  # holds the probabilities
EXAMPLES = {
    "score": "responses.jsonl --verifiers verifiers.yaml --out scores.npz",
    "fit": "scores.npz --out ensemble --verifiers verifiers.yaml",
    "predict": "scores.npz --aggregator ensemble --out probabilities.npz",
    "distil": "scores.npz --aggregator ensemble --model ENCODER --out distilled",
}


def add_to(commands: Any) -> None:
    """Add the command and its steps to the parser's."""
    weaver = commands.add_parser(
        "weaver",
        help="make one verifier of many weak ones",
        description="Make one verifier of many weak ones, without labels or with a handful. "
        "apps/weaver does all of it by one configuration.",
        epilog="example: forge weaver fit scores.npz --out aggregator.npz",
    )
    steps = weaver.add_subparsers(dest="step", required=True, metavar="STEP")

    # One step of the procedure each; `apps/weaver` runs all of them.
    score = _step(steps, "score", _score, "score responses by verifiers")
    score.add_argument("responses", help="JSON lines: prompt, responses and, where known, target, labels, answers")
    score.add_argument("--verifiers", required=True, help="YAML file that says which, see docs/configuration.md")
    score.add_argument("--out", required=True, help="scores, .npz")
    score.add_argument("--concurrency", type=int, default=16, help="problems that are scored at once")

    fit = _step(steps, "fit", _fit, "put the scores together")
    fit.add_argument("scores", help=".npz, or .parquet in the public layout of Weaver")
    fit.add_argument("--method", default="auto", help="auto, or another of docs/weaver.md")
    fit.add_argument("--class-balance", type=float, help="share of right responses, where it is known")
    fit.add_argument("--one-right", action="store_true", help="exactly one response of each problem is right")
    fit.add_argument("--labelled", type=int, default=0, help="let it see the labels of the first so many problems")
    fit.add_argument("--out", required=True, help="the aggregator, .npz; with --verifiers the folder of an ensemble")
    fit.add_argument("--verifiers", help="YAML file of the verifiers that gave the scores")

    predict = _step(steps, "predict", _predict, "add the probability of being right as one more column")
    predict.add_argument("scores", help=".npz")
    predict.add_argument("--aggregator", required=True, help="what fit left: a .npz file, or a folder")
    predict.add_argument("--out", required=True, help=f".npz, with a column `{COLUMN}`")

    distil = _step(steps, "distil", _distil, "train one model to say what the ensemble says")
    distil.add_argument("scores", help=".npz, with prompts and responses")
    distil.add_argument("--aggregator", required=True, help="what fit left: a .npz file, or a folder")
    distil.add_argument("--model", required=True, help="encoder: folder or hub id")
    distil.add_argument("--out", required=True, help="folder")
    distil.add_argument("--epochs", type=int, default=4, help="passes over the responses")
    distil.add_argument("--batch-size", type=int, default=64, help="responses a step")
    distil.add_argument("--learning-rate", type=float, default=5e-5, help="highest of the schedule")
    distil.add_argument("--max-tokens", type=int, help="of prompt and response; the model's own if not given")
    distil.add_argument("--joined", action="store_true", help="one text, ended by eos, instead of the tokenizer's pair")
    distil.add_argument("--seed", type=int, default=0, help="of the division of problems and of training")


def _step(steps: Any, name: str, run: Any, summary: str) -> argparse.ArgumentParser:
    parser = steps.add_parser(
        name,
        help=summary,
        description=f"{summary.capitalize()}.",
        epilog=f"example: forge weaver {name} {EXAMPLES[name]}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def guarded(args: argparse.Namespace) -> None:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: rules are modules of the user
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are in the report
                run(args)
        except (ValueError, OSError, ImportError) as error:
            raise SystemExit(f"error: {error}") from None
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None

    # Users see one line for their errors, a traceback for faults of the program.
    parser.set_defaults(run=guarded)
    return parser


def _score(args: argparse.Namespace) -> None:
    from forge.config import read
    from forge_verifiers.settings import VerifiersConfig

    from . import read_problems, score_table
    from .formats import check_path

    problems = read_problems(args.responses)
    verifiers = read(VerifiersConfig, Path(args.verifiers))
    verifiers.check_sources()
    if COLUMN in verifiers.names:
        raise ValueError(f"invalid verifier name {COLUMN}: it is the column that predict adds")
    check_path(args.out)
    # Names and outputs are checked before any model is loaded.
    panel = verifiers.panel()

    async def score() -> Any:
        try:
            return await score_table(panel, problems, concurrency=args.concurrency)
        finally:
            await panel.close()

    start = time.perf_counter()
    asyncio.run(score()).save(args.out)
    for reason, count in panel.missing.most_common():
        print(f"{count} x missing, {reason}")
    print(f"all of it took {time.perf_counter() - start:.1f} s\nwritten: {args.out}")


def _fit(args: argparse.Namespace) -> None:
    from forge.config import read
    from forge_verifiers.settings import VerifiersConfig

    from . import save_ensemble
    from .auto import fit_table

    table = _scores(args.scores)
    verifiers = None if args.verifiers is None else read(VerifiersConfig, Path(args.verifiers))
    if verifiers is not None:
        verifiers.check_sources()
    # All outputs are checked before the fit, which may take minutes.
    if args.out.endswith(".npz") == (verifiers is not None):
        raise ValueError("--out is a folder with --verifiers, and a .npz file without")
    if not Path(args.out).absolute().parent.is_dir():
        raise FileNotFoundError(f"cannot write {args.out}: there is no folder {Path(args.out).parent}")
    # An ensemble can only be used with the verifiers that it was fitted on.
    if verifiers is not None and (missing := [name for name in table.verifiers if name not in verifiers.names]):
        raise ValueError(f"{args.verifiers} has no {', '.join(missing)}, which gave scores")
    aggregator = fit_table(
        table, args.method, class_balance=args.class_balance, one_right=args.one_right, labelled=args.labelled
    )
    print(aggregator.report)
    if verifiers is not None:
        save_ensemble(args.out, verifiers, aggregator)
    else:
        aggregator.save(args.out)
    print(f"written: {args.out}")


def _scores(path: str) -> Any:
    """Load the table. ValueError: it already has the ensemble's column."""
    from . import ScoreTable

    table = ScoreTable.load(path)
    if COLUMN in table.verifiers:
        raise ValueError(f"{path} has a column {COLUMN}, which predict adds: give the scores without it")
    return table


def _predict(args: argparse.Namespace) -> None:
    from . import load
    from .formats import check_path

    check_path(args.out)
    table, aggregator = _scores(args.scores), load(args.aggregator)
    p = aggregator.predict_proba(table.select(aggregator.verifiers))
    table.with_verifier(COLUMN, p).save(args.out)
    print(f"written: {args.out}")


def _distil(args: argparse.Namespace) -> None:
    from forge.models import resolve_model

    from . import ScoreTable, load
    from .distil import distil

    table, aggregator = ScoreTable.load(args.scores), load(args.aggregator)
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
