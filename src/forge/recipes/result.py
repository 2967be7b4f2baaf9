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
        # Users may give the path of an earlier run as text.
        object.__setattr__(self, "folder", Path(self.folder))

    @property
    def model(self) -> str:
        """Return the path of the trained model's folder, which is in Hugging Face format."""
        return str(self.folder / "model")

    @property
    def report(self) -> str:
        """Return the path of the HTML report."""
        return str(self.folder / "report.html")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step as a dict, as in metrics.jsonl; step 0 is the evaluation before training."""
        return _read_lines(self.folder / "metrics.jsonl")

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        """Return a dict for each recorded group, with its prompt, first response, target, rewards and step. The file
        `rollouts.arrow` has all its samples with their tokens."""
        return [line for _, batch in read_batches(self.folder / ROLLOUTS) for line in texts_by_group(batch)]

    @property
    def held_out(self) -> list[dict[str, Any]]:
        """Return a dict for each answer to a held-out problem at each evaluation, with the keys step, problem, prompt,
        target, response, reward, correct, tokens and finish."""
        return _read_lines(self.folder / HELD_OUT)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
