"""The results of a run, read from its directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..observability.rollouts import HELD_OUT, ROLLOUTS, read_batches, texts_by_group


@dataclass(frozen=True)
class Result:
    """The results of a run, in its `folder`."""

    folder: Path

    def __post_init__(self) -> None:
        # Of a run of another day one knows the path as text.
        object.__setattr__(self, "folder", Path(self.folder))

    @property
    def model(self) -> str:
        """Return the trained model's folder, in Hugging Face format."""
        return str(self.folder / "model")

    @property
    def report(self) -> str:
        """Return the HTML report."""
        return str(self.folder / "report.html")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per step, as in metrics.jsonl; the row of step 0 is the evaluation before training."""
        return _read_lines(self.folder / "metrics.jsonl")

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        """Return the groups that were recorded: prompt, first response, target, rewards, step. `rollouts.arrow` has all
        samples with their tokens."""
        return [line for _, batch in read_batches(self.folder / ROLLOUTS) for line in texts_by_group(batch)]

    @property
    def held_out(self) -> list[dict[str, Any]]:
        """Return the answers to held-out problems at each evaluation: step, problem, prompt, target, response, reward,
        correct, tokens, finish."""
        return _read_lines(self.folder / HELD_OUT)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
