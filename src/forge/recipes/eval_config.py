"""The section `eval`: which held-out problems are evaluated when, and how answers to them are sampled."""

from dataclasses import fields
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from ..config.plugin import hint_nearest
from ..config.sections import ConfigError, Section
from ..data.files import PathOrRows
from ..types import Sampling

# Settings of sampling that are not of one answer, or that the evaluation decides.
_FIXED = ("n", "seed", "top_logprobs", "grammar", "logprobs_of")
_RESERVED = ("accuracy", "reward", "turns", "unscored", "loss")  # metrics of the first set


class EvalConfig(Section):
    """Evaluation on held-out problems, rows or pairs, before and after training."""

    problems: NonNegativeInt = 256
    """How many; 0: no evaluation."""
    every: NonNegativeInt = 0
    """Also every that many steps, a multiple of `training.sync_interval`."""
    path: PathOrRows = None
    """Where they come from; null: `dataset.path`. A procedural task holds its own out. From Python also rows."""
    split: str = "test"
    """Of a folder or hub id."""
    stop_at: float = 1.1
    """Training ends once `eval/accuracy` reaches it."""

    def intervals(self) -> dict[str, int]:
        """Return {name of a set: steps between two of its evaluations}; the set of this section is "", and it is
        missing if it has no problems."""
        return {"": self.every} if self.problems else {}

    def due(self, step: int) -> bool:
        """Return whether some set is due after this step, by its interval only."""
        return any(interval and step % interval == 0 for interval in self.intervals().values())


class EvalSet(Section):
    """An additional set of held-out problems, whose metrics are `eval/NAME/...`."""

    problems: PositiveInt = 256
    """How many."""
    every: NonNegativeInt | None = None
    """Also every that many steps; null: as `eval.every`."""
    path: PathOrRows = None
    """A file, folder or hub id. From Python also rows."""
    split: str = "test"
    """Of a folder or hub id."""
    dataset: dict[str, Any] = Field(default_factory=dict)
    """Keys of the section `dataset` in which these problems differ, such as `prompt_template`, or a `task`."""
    n: PositiveInt = 1
    """Answers to each problem: with several, `pass@k` and `maj@n` are measured."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Settings with which answers are sampled, such as `temperature` and `max_tokens`; without them answers are greedy,
    and several of temperature 1."""

    def _check(self) -> None:
        if self.path is None and "task" not in self.dataset:
            raise ConfigError("each set of eval.sets needs a path, or a dataset with a task")
        check_sampling(self.sampling, self.n)


class RLEvalConfig(EvalConfig):
    """Evaluation of a policy on held-out problems ([data.md](data.md)), before and after training."""

    n: PositiveInt = 1
    """Answers to each problem: with several, `eval/pass@k` and `eval/maj@n` are measured."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Settings with which answers are sampled, such as `temperature` and `max_tokens`; without them answers are greedy,
    and several of temperature 1."""
    sets: dict[str, EvalSet] = Field(default_factory=dict)
    """Additional sets of problems, by name."""
    best: str | None = None
    """A metric, such as `eval/accuracy`: the model with its largest value so far is kept in the run's folder `best`."""

    def _check(self) -> None:
        check_sampling(self.sampling, self.n)
        # Whether the metric exists is known after the first evaluation.
        if self.best is not None and not self.intervals():
            raise ConfigError("eval.best has no effect without an evaluation: set eval.problems, or omit it")
        for name in self.sets:
            if name in _RESERVED or "/" in name or "@" in name or not name:
                raise ConfigError(
                    f"eval.sets: {name!r} is an invalid name, because metrics are called eval/NAME/accuracy: choose "
                    "another"
                )

    def intervals(self) -> dict[str, int]:
        """Return {name of a set: steps between two of its evaluations}, with the additional sets."""
        own = {name: section.every for name, section in self.sets.items()}
        return super().intervals() | {name: self.every if every is None else every for name, every in own.items()}


def check_sampling(sampling: dict[str, Any], n: int) -> None:
    """Check the settings with which n answers to a problem are sampled.

    Raises:
        ConfigError: a name is unknown, a value is invalid, or all of several answers would be equal.
    """
    names = [field.name for field in fields(Sampling) if field.name not in _FIXED]
    for name in sampling:
        if name not in names:
            raise ConfigError(f"eval.sampling: unknown setting {name!r}{hint_nearest(name, names)}")

    try:
        Sampling(**sampling)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"eval.sampling: {error}") from None

    # n greedy answers would cost n times as much, and pass@n would be pass@1.
    if n > 1 and sampling.get("temperature") == 0:
        raise ConfigError(f"eval.sampling.temperature is 0, so all n = {n} answers would be equal: set n to 1")
