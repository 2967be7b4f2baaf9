"""The evaluations of a run: sets of held-out problems, each with its interval, sampling and reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config.sections import build
from ..envs.group import GroupEnv
from ..models.tokenizer import model_tokenizer
from ..runtime.controller.handle import Handle
from ..types import Sample
from .eval_config import RLEvalConfig
from .rl_config import RLConfig


@dataclass(frozen=True)
class HeldOut:
    """Set of held-out problems with its interval, sampling settings and environment.

    name: of the set in metrics; "" for the section `eval` itself.
    samples: its problems.
    env: plays and scores the answers.
    every: steps between two evaluations; 0: only before the first and after the last step.
    n: answers to each problem.
    sampling: settings of `forge.types.Sampling` with which they are sampled.
    """

    name: str
    samples: Sequence[Sample]
    env: GroupEnv
    every: int
    n: int
    sampling: Mapping[str, Any]


class Evaluation:
    """Evaluation of the sets of held-out problems that are due after a step.

    Args:
        sets: all of the run's sets.
        record: the run, which keeps the answers (`keep_evaluation`).
        steps: number of steps of the run; all sets are evaluated before the first and after the last one.
    """

    def __init__(self, sets: Sequence[HeldOut], record: Any, steps: int) -> None:
        self.sets, self.record, self.steps = sets, record, steps
        self._step = -1
        self._done: set[str] = set()  # sets that were evaluated at this step

    async def run(self, policy: Handle, step: int) -> dict[str, float]:
        """Return the metrics of the sets that are due after this step.

        If none is due, or those that are have already been evaluated after it, the run ends here: then all remaining
        sets are evaluated.
        """
        if step != self._step:
            self._step, self._done = step, set()

        # Called twice after a step in which a hook ends the run: for the sets that are due, and for the remaining ones.
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
    """Return the evaluation of a run, which evaluates the sets in the order of the configuration.

    Args:
        first: the problems of the section `eval` itself.
        sets: the problems of each of `eval.sets`, by name.
        record: the run.
        env: plays and scores the answers.
    """
    intervals = cfg.eval.intervals()
    plans: list[HeldOut] = []

    if first:
        plans.append(HeldOut("", first, env, intervals[""], cfg.eval.n, cfg.eval.sampling))
    for name, samples in sets.items():
        settings = cfg.eval.sets[name]
        plans.append(HeldOut(name, samples, env, intervals[name], settings.n, settings.sampling))

    return Evaluation(plans, record, cfg.training.steps)


def load_sets(dataset: Any, evaluation: Any, model: str, seed: int) -> dict[str, list[Sample]]:
    """Return {name: held-out problems} of `eval.sets`; empty for a recipe without sets.

    Args:
        dataset: the section `dataset` of the training data, from which each set differs in some keys.
        evaluation: the section `eval`.
        model: folder of the model, whose tokenizer reads the problems.

    Raises:
        ValueError, FileNotFoundError: a set cannot be read, or has too few problems; names the set.
    """
    from ..data.load import load_data

    problems: dict[str, list[Sample]] = {}
    if not isinstance(evaluation, RLEvalConfig):
        return problems

    for name, settings in evaluation.sets.items():
        # Held-out problems are always the first rows in stored order.
        fixed: dict[str, Any] = {
            "path": settings.path,
            "split": settings.split,
            "task": None,
            "sources": None,
            "streaming": False,
            "shuffle": False,
            "sampler": None,
        }
        location = f"eval.sets.{name}"
        section = build(type(dataset), {**dataset, **fixed, **settings.dataset}, f"{location}.dataset")
        try:
            data: Any = load_data(model_tokenizer(model), kind=section.kind, seed=seed, **section)
            problems[name] = data.held_out(settings.problems)
        except (ValueError, OSError) as error:
            raise type(error)(f"{location}: {error}") from error

    return problems
