"""The folder that a run leaves behind, and everything that is written to it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..types import Group
from .console import Progress
from .metrics import Snapshot
from .report import write_report
from .trace import write_trace


class Run:
    """`<root>/<name>/`: config.yaml, metrics.jsonl, rollouts.jsonl, trace.json, report.html, curves.png; the trainer
    adds checkpoints/ and model/.

    Args:
        config: the resolved configuration, plain data.
        steps: training steps, for the progress bar.
        overwrite: remove an earlier run of this name.
        tensorboard: also write TensorBoard event files.

    Raises:
        FileExistsError: the folder holds an earlier run and `overwrite` is False.
        ModuleNotFoundError: tensorboard is asked for and not installed.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        *,
        steps: int,
        root: str = "runs",
        overwrite: bool = False,
        tensorboard: bool = False,
    ) -> None:
        self.folder = Path(root) / name
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "metrics.tensorboard needs the tensorboard package: pip install 'torchforge[tensorboard]'"
            )
        if (self.folder / "metrics.jsonl").exists():
            if not overwrite:
                raise FileExistsError(
                    f"{self.folder} holds an earlier run: choose another run.name, or set run.overwrite to true"
                )
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        self._metrics = (self.folder / "metrics.jsonl").open("a")
        self._rollouts = (self.folder / "rollouts.jsonl").open("a")
        self._board = _summary_writer(self.folder / "tensorboard") if tensorboard else None
        self._progress = Progress(name, steps)
        self._all = Snapshot()
        self._started = self._last = time.perf_counter()
        self.history: list[dict[str, float]] = []

    @property
    def checkpoints(self) -> str:
        return str(self.folder / "checkpoints")

    @property
    def recovery(self) -> str:
        """Folder of what components need to go on after the loss of a process; removed by `close`."""
        return str((self.folder / "recovery").resolve())

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    def log(self, step: int, snapshot: Snapshot, **values: float) -> dict[str, float]:
        """Write one row: everything recorded since the last one, `values`, and the rates that follow from them."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        row = {"step": float(step), "seconds": now - self._started, **snapshot.values(), **values}
        row["seconds/step"] = seconds
        row["generation/tokens_per_second"] = row.get("generation/tokens", 0.0) / seconds
        if row.get("seconds/train"):
            row["train/tokens_per_second"] = row.get("train/tokens", 0.0) / row["seconds/train"]
        self._all.spans.extend(snapshot.spans)
        self.history.append(row)
        self._metrics.write(json.dumps({k: float(f"{v:.8g}") for k, v in row.items()}) + "\n")
        self._metrics.flush()
        if self._board is not None:
            for name, value in row.items():
                self._board.add_scalar(name, value, step)
        self._progress.update(step, row)
        return row

    def log_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Keep these groups as they were, with the step that trains on them: one line each, the first response in
        full and the rewards of all."""
        for group in groups:
            line = {
                "step": step,
                "index": group.index,
                "version": group.version,
                "prompt": group.prompt,
                "response": group.episodes[0].text,
                "target": group.target,
                "rewards": group.rewards,
            }
            self._rollouts.write(json.dumps(line) + "\n")
        self._rollouts.flush()

    def say(self, text: str) -> None:
        """Print a line without tearing the progress bar."""
        self._progress.say(text)

    def close(self) -> None:
        """Write the report and the trace from whatever was logged, also after an interruption."""
        self._progress.close()
        shutil.rmtree(self.recovery, ignore_errors=True)
        evaluated = [row for row in self.history if "eval/accuracy" in row]
        if evaluated:
            first, last = evaluated[0], evaluated[-1]
            print(
                f"held-out accuracy {first['eval/accuracy']:.3f} at step {first['step']:.0f}, "
                f"{last['eval/accuracy']:.3f} at step {last['step']:.0f}; results in {self.folder}"
            )
        self._metrics.close()
        self._rollouts.close()
        if self._board is not None:
            self._board.close()
        write_trace(self.folder / "trace.json", self._all.spans)
        if self.history:
            write_report(self.folder, self.history)


def _summary_writer(folder: Path):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
