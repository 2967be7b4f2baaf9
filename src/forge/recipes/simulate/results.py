"""The results of a simulated run, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from .settings import SimulationSettings


@dataclass
class Counters:
    """Sums since the start of a run, at the end of a step. Busy seconds are of all replicas together.

    Attributes:
        seconds: virtual time.
        generators, rows: seconds in which engines had rows, and their sum over rows.
        trainer, rewards: seconds in which they worked.
        trained_tokens: tokens of completions that were trained.
    """

    seconds: float = 0.0
    generators: float = 0.0
    rows: float = 0.0
    trainer: float = 0.0
    rewards: float = 0.0
    trained_tokens: int = 0


@dataclass
class SimulatedRun:
    """A simulated run. Numbers of a step leave the first ones out, while the pipeline fills.

    Attributes:
        settings: what was simulated.
        steps: counters after each step; the first entry is the start.
        ages: mean and greatest policy age of each step.
        begun, trained, dropped, unfinished: groups: admitted, trained, dropped by reason, and those that were waiting
            or running at the end.
        generated_tokens, lost_tokens, dropped_tokens: of completions: drawn, lost with a machine, in dropped groups.
        failures: of hardware.
        repeated: training steps that were done again after a failure of the trainer.
        ending: why it ended before its last step; empty if it did not.
    """

    settings: SimulationSettings
    steps: list[Counters] = field(default_factory=lambda: [Counters()])
    ages: list[tuple[float, int]] = field(default_factory=list)
    begun: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    unfinished: int = 0
    generated_tokens: float = 0.0
    lost_tokens: float = 0.0
    dropped_tokens: int = 0
    failures: int = 0
    repeated: int = 0
    ending: str = ""

    @property
    def finished(self) -> bool:
        """Whether it reached its last step."""
        return len(self.ages) == self.settings.steps

    @property
    def seconds(self) -> float:
        """Virtual seconds of all steps."""
        return self.steps[-1].seconds

    @property
    def _first(self) -> Counters:
        return self.steps[min(5, (len(self.steps) - 1) // 4)]

    @property
    def _span(self) -> float:
        return max(self.steps[-1].seconds - self._first.seconds, 1e-12)

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step; infinity if there was none."""
        count = len(self.steps) - 1 - min(5, (len(self.steps) - 1) // 4)
        return self._span / count if count else float("inf")

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens of completions per second."""
        return (self.steps[-1].trained_tokens - self._first.trained_tokens) / self._span

    @property
    def generator_utilisation(self) -> float:
        """Share of time in which an engine has rows, over all engines."""
        return (self.steps[-1].generators - self._first.generators) / self._span / self.settings.generators.replicas

    @property
    def occupancy(self) -> float:
        """Rows over slots, while an engine has rows."""
        busy = self.steps[-1].generators - self._first.generators
        return (self.steps[-1].rows - self._first.rows) / max(busy, 1e-12) / self.settings.generators.slots

    @property
    def trainer_utilisation(self) -> float:
        """Share of time in which the trainer trains; steps that are done again do not count."""
        return (self.steps[-1].trainer - self._first.trainer) / self._span

    @property
    def utilisation(self) -> float:
        """Share of the time of all GPUs in which they generate, score or train."""
        settings = self.settings
        rewards = (self.steps[-1].rewards - self._first.rewards) / self._span * settings.rewards.gpus
        generators = self.generator_utilisation * settings.generator_gpus
        return (generators + rewards + self.trainer_utilisation * settings.trainer_gpus) / settings.all_gpus

    @property
    def age(self) -> float:
        """Mean policy age of the trained groups."""
        return sum(mean for mean, _ in self.ages) / max(len(self.ages), 1)

    @property
    def max_age(self) -> int:
        """Greatest policy age of a trained group."""
        return max((most for _, most in self.ages), default=0)

    @property
    def waste(self) -> float:
        """Share of the drawn tokens that were dropped, or lost with a machine."""
        return (self.lost_tokens + self.dropped_tokens) / max(self.generated_tokens, 1)

    @property
    def completion(self) -> float:
        """Share of the steps that were done."""
        return len(self.ages) / self.settings.steps


HEAD = (
    *("s/step", "tok/s", "generators", "rows", "trainer", "GPUs"),
    *("age", "max", "dropped", "waste", "failures", "steps", "finished"),
)


def cells(runs: Sequence[SimulatedRun]) -> list[str]:
    """The cells of runs that differ in their seed, as means over them, in the order of `HEAD`."""

    def average(name: str) -> float:
        return mean(getattr(run, name) for run in runs)

    return [
        f"{average('step_seconds'):.4g}",
        f"{average('tokens_per_second'):.4g}",
        *(f"{average(name):.0%}" for name in ("generator_utilisation", "occupancy", "trainer_utilisation")),
        f"{average('utilisation'):.0%}",
        f"{average('age'):.2f}",
        str(max(run.max_age for run in runs)),
        f"{mean(sum(run.dropped.values()) for run in runs):.4g}",
        f"{average('waste'):.1%}",
        f"{average('failures'):.3g}",
        f"{average('completion'):.0%}",
        f"{average('finished'):.0%}",
    ]


def table(lines: Sequence[tuple[Mapping[str, object], Sequence[SimulatedRun]]]) -> str:
    """A table with a line for each setting, which begins with the values that it was swept to; means over its runs."""
    rows = [[*(lines[0][0] if lines else ()), *HEAD]]
    rows += [[*map(str, swept.values()), *cells(runs)] for swept, runs in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
