"""The evaluations of a run: sets of held-out problems, each with its interval, sampling and reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config.sections import build
from ..envs.group import GroupEnv
from ..models.tokenizer import model_tokenizer
from ..runtime.controller.handle import Handle
from ..types import Sample
from .eval_config import RLEvalConfig

if TYPE_CHECKING:
    from .rl_config import RLConfig


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out problems. `name` is "" for the first one, `every` 0 for the first and last step only."""

    name: str
    samples: Sequence[Sample]
    env: GroupEnv
    every: int
    n: int
    sampling: Mapping[str, Any]


class Evaluation:
    """Evaluates the sets that are due.

    Args:
        record: the run, which keeps the answers (`keep_evaluation`).
        steps: of the run; all sets are evaluated before the first and after the last.
    """

    def __init__(self, sets: Sequence[HeldOut], record: Any, steps: int) -> None:
        self.sets = sets
        self.record = record
        self.steps = steps
        self._step = -1
        self._done: set[str] = set()  # sets that were evaluated at this step

    async def run(self, policy: Handle, step: int) -> dict[str, float]:
        """Evaluate what is due after a step. Where nothing is, or was already, the run ends here: all the others."""
        if step != self._step:
            self._step = step
            self._done = set()

        # A run that is stopped by a hook asks twice: for what was due, and for the rest.
        pending = [held_out for held_out in self.sets if held_out.name not in self._done]
        is_end = step in (0, self.steps)
        due = [held_out for held_out in pending if is_end or (held_out.every and step % held_out.every == 0)]
        metrics: dict[str, float] = {}

        for held_out in due or pending:
            self._done.add(held_out.name)
            keep = partial(self.record.keep_evaluation, name=held_out.name)
            prefix = f"eval/{held_out.name}" if held_out.name else "eval"
            settings = {**held_out.sampling, "n": held_out.n, "prefix": prefix}
            metrics |= await held_out.env.evaluate(policy, held_out.samples, keep, **settings)

        return metrics


def plan_evaluation(
    cfg: RLConfig, first: Sequence[Sample], sets: Mapping[str, Sequence[Sample]], record: Any, env: GroupEnv
) -> Evaluation:
    """Return the evaluation of a run.

    Args:
        first: the problems of the section `eval` itself. `sets`: `eval.sets`.
    """
    intervals = cfg.eval.intervals()
    # Metrics keep the order of the configuration.
    plans: list[HeldOut] = []
    if first:
        plans.append(HeldOut("", first, env, intervals[""], cfg.eval.n, cfg.eval.sampling))
    for name, samples in sets.items():
        settings = cfg.eval.sets[name]
        plans.append(HeldOut(name, samples, env, intervals[name], settings.n, settings.sampling))
    return Evaluation(plans, record, cfg.training.steps)


def load_sets(dataset: Any, evaluation: Any, model: str, seed: int) -> dict[str, list[Sample]]:
    """Return the problems of `eval.sets`, by name.

    Args:
        dataset: the section `dataset` of the training data.

    Raises:
        ValueError, FileNotFoundError: a set cannot be read, or has too few problems; names the set.
    """
    from ..data.load import load_data

    problems: dict[str, list[Sample]] = {}
    if not isinstance(evaluation, RLEvalConfig):
        return problems
    for name, settings in evaluation.sets.items():
        # Held-out problems are the first ones in stored order, whatever the training data does.
        fixed: dict[str, Any] = {"path": settings.path, "task": None, "sources": None, "split": settings.split}
        fixed |= {"streaming": False, "shuffle": False, "sampler": None}
        location = f"eval.sets.{name}"
        section = build(type(dataset), {**dataset, **fixed, **settings.dataset}, f"{location}.dataset")
        try:
            data: Any = load_data(model_tokenizer(model), kind=section.kind, seed=seed, **section)
            problems[name] = data.held_out(settings.problems)
        except (ValueError, OSError) as error:
            raise type(error)(f"{location}: {error}") from error

    return problems
