"""A reward without labels: responses are collected and scored by weak verifiers, and their scores made into one
probability.

    python -m apps.weaver.main --config apps/weaver/tiny.yaml
    python -m apps.grpo.main --config apps/weaver/grpo.yaml

The first leaves an ensemble in `runs/<name>/`: responses.jsonl, scores.npz, verifiers.yaml, aggregator.npz
and, if it is asked for, a distilled verifier. The second trains with it, as `forge_weaver:Ensemble`.
"""

import asyncio
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

try:
    import forge_weaver as _  # noqa: F401
except ImportError as error:
    raise SystemExit(f"error: {error}") from error

from apps.weaver import stages
from apps.weaver.config import WeaverConfig
from forge.config import load
from forge.observability.folder import RunLock
from forge.runtime.controller import ForgeError, run
from forge.types import Sample
from forge_weaver import save_ensemble, write_problems
from forge_weaver.distil import distil


async def main(cfg: WeaverConfig, model: str, samples: list[Sample], folder: Path) -> None:
    problems = await stages.collect(cfg, model, samples)
    write_problems(folder / "responses.jsonl", problems)
    if cfg.collect.truth is not None:
        problems = await stages.label(cfg.collect.truth, problems)
        write_problems(folder / "responses.jsonl", problems)
    table = await stages.score(cfg, problems)
    table.save(folder / "scores.npz")
    aggregator = stages.fit(cfg.fit, table)
    save_ensemble(folder, cfg.verifiers, aggregator)
    print(aggregator.report)
    if cfg.distil is not None:
        probabilities, to = aggregator.predict_proba(table), folder / "distilled"
        work = partial(distil, table, probabilities, folder=to, seed=cfg.seed, say=print, **cfg.distil)
        print(await asyncio.to_thread(work))
    (folder / "finished").touch()


def launch(argv: list[str]) -> None:
    """Check everything, then run `main`. Bad input ends the program with one line and starts nothing."""
    try:
        cfg = load(WeaverConfig, argv)
        folder = Path(cfg.run.root) / cfg.run.name
        with closing(RunLock(folder)):
            model, samples = stages.check(cfg, folder)
            run(main(cfg, model, samples, folder))
    except (ForgeError, ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    launch(sys.argv[1:])
