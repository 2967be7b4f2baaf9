"""The folder of a run, and all that is written to it."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from ..config.plugin import resolve
from ..config.sections import flatten_config
from ..system.checksums import DamagedFile, read_sealed, write_sealed
from ..system.files import make_private, room_for, write_atomic
from ..system.masking import mask_secrets, without_secrets
from ..types import Batch, Episode, Group, Sample
from .console import Progress, configure_logging, log
from .folder import CONFIG, ENDED, FINISHED, LOGS, MARK, check_free, clear_run, cut_lines, hash_file, last_state
from .lines import Row
from .machine import measure_gpus, measure_room
from .metrics import Clock, Snapshot, phase
from .rollouts import HELD_OUT, ROLLOUTS, RolloutLog, held_out_lines
from .rollouts import cut_rollouts as cut_rollouts
from .schedule import NUMBERS, SCHEDULE, GroupEntry, StepEntry, header_line, published_line
from .trace import TRACE, Trace

# Functions of extensions that are called with the directory of a run that ends, and how ("finished", "failed: why").
RUN_END = "forge.run_end"
Evaluated = tuple[Sequence[Sample], Sequence[Episode], str]  # with the name of their set
FLAT_STEPS = 20  # steps with a reward of 0 throughout, after which a warning names the probable cause


class Run:
    """`<root>/<name>/`: config.yaml, metrics.jsonl, rollouts.arrow, schedule.jsonl, trace.json, report.html; the
    trainer adds checkpoints/ and model/, and trackers their own files.

    Args:
        config: the resolved configuration, plain data. Its section `metrics` names the trackers. Secrets are removed
            before it is written.
        steps: training steps, for the progress bar.
        overwrite: remove an earlier run of this name.
        resume: the checkpoint that the run resumes from: records after it are removed, whatever `overwrite` is.
        start: the step of that checkpoint.
        peak: TFLOP/s of one device, see `forge.models.flops`; None if unknown.

    Raises:
        FileExistsError: the folder holds an earlier run, and neither `overwrite` nor `resume` is given.
    """

    def __init__(
        self,
        name: str,
        config: Row,
        *,
        steps: int,
        root: str = "runs",
        overwrite: bool = False,
        resume: str | None = None,
        start: int = 0,
        peak: float | None = None,
    ) -> None:
        self.folder = Path(root) / name
        self.resume = resume
        self.start = start
        self.peak = peak
        if resume is None:
            check_free(self.folder, overwrite)
            if (self.folder / MARK).exists():
                clear_run(self.folder)

        if resume:
            self._check_logs()
        else:
            make_private(self.folder)

        # Records after the checkpoint are removed: these steps are computed again.
        self.history: list[dict[str, float]] = cut_lines(self.folder / MARK, start) if resume else []
        if resume:
            cut_rollouts(self.folder / ROLLOUTS, start)
            cut_lines(self.folder / HELD_OUT, start)
            cut_lines(self.folder / SCHEDULE, start)

        # What an earlier attempt has said about its end is no longer true.
        for name in (FINISHED, ENDED):
            (self.folder / name).unlink(missing_ok=True)
        write_sealed(self.folder / CONFIG, yaml.safe_dump(without_secrets(config), sort_keys=False))
        self._logs = {name: (self.folder / name).open("ab") for name in (MARK, ROLLOUTS, HELD_OUT, SCHEDULE)}
        self._digests = {name: hash_file(self.folder / name) for name in self._logs}
        self._trace = Trace(self.folder / TRACE)
        self._rollouts: RolloutLog | None = None

        self._evaluated: list[Evaluated] = []
        if resume:
            self.sync()  # the checksums may cover rows that were removed
        self._trackers: Any = None
        metrics = config.get("metrics", {})
        if any(map(metrics.get, ("tensorboard", "wandb", "tracker"))):
            make_delivery = resolve("forge_trackers:Delivery", "metrics")
            self._trackers = make_delivery(self.folder, metrics, config, start)
        configure_logging()

        self._progress = Progress(name, steps, start)
        self._finished = False
        self._full = False
        self._settings = flatten_config(config)
        self._clock = Clock()
        self._warned_flat = False
        self._last = time.perf_counter()
        self._started = self._last - (self.history[-1]["seconds"] if self.history else 0.0)

    @property
    def checkpoints(self) -> str:
        """Return path of the checkpoints' folder."""
        return str(self.folder / "checkpoints")

    @property
    def recovery(self) -> str:
        """Return path of the folder from which replaced components recover their state; removed by `close`."""
        return str((self.folder / "recovery").resolve())

    @property
    def model(self) -> str:
        """Return path of the exported model."""
        return str(self.folder / "model")

    @property
    def best(self) -> str:
        """Return path of the model that was best by `eval.best`."""
        return str(self.folder / "best")

    def model_of(self, policy: str) -> str:
        """Return path of the exported model of one of several policies; the run's own is `model`."""
        return self.model if policy == "policy" else str(self.folder / f"model-{policy}")

    def steps(self, end: int) -> Iterator[int]:
        """Yield the remaining steps up to `end`, numbered by the version that each trains. Measures how long the
        current task waits in each phase: `wall/<phase>`, in seconds."""
        self._clock.start()
        if self.start:  # the start-up time belongs to no row
            self._last = time.perf_counter()
        yield from range(self.start, end)

    def log(self, step: int, snapshot: Snapshot, **values: float) -> dict[str, float]:
        """Write one row: everything recorded since the last one, `values`, and rates. `wall/accounted` is the share of
        the time since the last row that the phases add up to."""
        with phase("log"):
            now = time.perf_counter()
            seconds = now - self._last
            self._last = now
            row = {"step": float(step), "seconds": now - self._started, **snapshot.values(), **values}
            row["seconds/step"] = seconds

            # The wall time of a step by phase; the rest of it is in no phase.
            spent = self._clock.take()
            if spent:
                row |= {f"wall/{name}": duration for name, duration in spent.items()}
                row["wall/accounted"] = sum(spent.values()) / seconds
            row["generation/tokens_per_second"] = row.get("generation/tokens", 0.0) / seconds
            if row.get("seconds/train"):
                row["train/tokens_per_second"] = row.get("train/tokens", 0.0) / row["seconds/train"]
            row |= self._usage_metrics(snapshot, row) | measure_room(self.folder) | measure_gpus()

            # A step exists once its line is in the file of metrics.
            self.history.append(row)
            self._write_log(MARK, (json.dumps({k: float(f"{v:.8g}") for k, v in row.items()}) + "\n").encode())
            for evaluated in self._evaluated:
                self._write_log(HELD_OUT, held_out_lines(step, *evaluated))
            self._evaluated = []
            self._trace.write(snapshot, step, row)
            self._progress.update(step, row)

            # A reward that never gives anything is a mistake of the setup, and would waste the whole run.
            last = self.history[-FLAT_STEPS:]
            flat = [r for r in last if r.get("reward") == 0 and r.get("reward/std") == 0]
            if len(flat) == FLAT_STEPS and not self._warned_flat:
                self._warned_flat = True
                truncated = sum(r["generation/truncated"] for r in flat) / FLAT_STEPS
                cause = "the reward may expect another format, or a target that responses never equal"
                if truncated > 0.5:
                    cause = f"{truncated:.0%} of the completions were cut at max_tokens: raise it"
                log.warning(
                    "the reward of every sample of the last %d steps was 0: %s. Compare responses with targets in %s",
                    FLAT_STEPS,
                    cause,
                    self.folder / ROLLOUTS,
                )

            return row

    def _usage_metrics(self, snapshot: Snapshot, row: dict[str, float]) -> dict[str, float]:
        """Return CPU-seconds so far, CPU-seconds and memory by service, FLOP/s and MFU."""
        metrics = {"cpu_seconds": self.history[-1].get("cpu_seconds", 0.0) if self.history else 0.0}
        for use in snapshot.usage:
            # Replicas of a service are numbered: their names are the service's with a number.
            service = use.process.rstrip("0123456789").rstrip("_")
            cpu = f"cpu_seconds/{service}"
            memory = f"memory_mb/{service}"
            metrics[cpu] = metrics.get(cpu, 0.0) + use.cpu_seconds
            metrics[memory] = max(metrics.get(memory, 0.0), use.memory / 1e6)
            metrics["cpu_seconds"] += use.cpu_seconds

        # The trainer's rate is over the time that it trains, the generators' over the whole step, as they run alongside
        # it.
        seconds = {"train": row.get("seconds/train"), "generator": row["seconds/step"]}
        devices = {
            "train": self._count_devices("trainer", "procs"),
            "generator": self._count_devices("generator", "num_replicas"),
        }
        for name, spent in seconds.items():
            if spent and row.get(f"{name}/flops"):
                metrics[f"{name}/tflops"] = row[f"{name}/flops"] / spent / 1e12
                if self.peak:
                    metrics[f"{name}/mfu"] = metrics[f"{name}/tflops"] / (self.peak * devices[name])

        return metrics

    def _count_devices(self, service: str, key: str) -> float:
        return self._settings.get(f"services.{service}.{key}") or 1

    def keep_evaluation(self, samples: Sequence[Sample], episodes: Sequence[Episode], name: str = "") -> None:
        """Have `log` write the answers to held-out problems, of the set of this name, with its row."""
        self._evaluated.append((samples, episodes, name))

    def record(self, groups: int | Literal["all"], max_bytes: float, spell: Callable[[int], str]) -> None:
        """Record rollouts: `groups` of each step, up to `max_bytes`; `spell` returns the text of a token."""
        path = self.folder / ROLLOUTS
        self._rollouts = RolloutLog(path, lambda data: self._write_log(ROLLOUTS, data), groups, max_bytes, spell)

    def pick(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups of a step whose tokens are recorded."""
        return [] if self._rollouts is None else self._rollouts.pick(groups)

    def log_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        batch: Batch | None = None,
        trained: Mapping[str, np.ndarray] | None = None,
        dropped: Sequence[tuple[str, Group]] = (),
    ) -> None:
        """Write the rollouts of a step, see `RolloutLog.add`."""
        with phase("log_rollouts"):
            if self._rollouts is not None:
                self._rollouts.add(step, groups, batch, trained, dropped)

    def begin_schedule(self, recipe: str, by_hand: Sequence[str]) -> None:
        """Write what ran, if the schedule does not have it from before a resume.

        Args:
            recipe: the loop, "module:class".
            by_hand: what was passed from Python, which no file has.
        """
        if not (self.folder / SCHEDULE).stat().st_size:
            self._write_log(SCHEDULE, f"{header_line(recipe, by_hand)}\n".encode())

    def schedule_entry(self, step: int, groups: Sequence[Group]) -> StepEntry:
        """Return the entry of a step for `log_schedule`: before penalties change the rewards of its groups."""
        with phase("log_rollouts"):
            return StepEntry(step, tuple(map(GroupEntry.from_group, groups)))

    def log_published(self, version: int, identity: str) -> None:
        """Write that generators get these weights."""
        self._write_log(SCHEDULE, f"{published_line(version, identity)}\n".encode())

    def log_schedule(
        self, entry: StepEntry, dropped: Sequence[tuple[str, Group]], metrics: Mapping[str, float]
    ) -> StepEntry:
        """Write the entry of a step, with what was dropped since the one before, and what the trainer returned."""
        with phase("log_rollouts"):
            numbers = {name: float(metrics[name]) for name in NUMBERS if name in metrics}
            dropped_groups = tuple(GroupEntry.from_group(group, reason) for reason, group in dropped)
            whole_entry = replace(entry, dropped=dropped_groups, numbers=numbers)
            self._write_log(SCHEDULE, f"{whole_entry.line()}\n".encode())
        return whole_entry

    def sync(self) -> None:
        """fsync the logs, which must have all steps of a checkpoint after a power cut, and write their checksums."""
        for file in self._logs.values():
            os.fsync(file.fileno())
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self._logs.items()}
        rows = (f"{digest.hexdigest()} {sizes[name]} {name}\n" for name, digest in self._digests.items())
        write_sealed(self.folder / LOGS, "".join(rows))

    def _write_log(self, name: str, data: bytes) -> None:
        with room_for(self.folder / name, len(data)):
            self._logs[name].write(data)
            self._logs[name].flush()
        self._digests[name].update(data)

    def _check_logs(self) -> None:
        """Compare the logs with their checksums at the last checkpoint. Training does not read them: damage is a
        warning."""
        try:
            rows = [line.split(" ", 2) for line in read_sealed(self.folder / LOGS).splitlines()]
        except DamagedFile as error:
            log.warning("%s: damage of the logs before this checkpoint would not be noticed", error)
            return
        for expected, size, name in rows:
            path = self.folder / name
            if not path.exists() or hash_file(path, int(size)).hexdigest() != expected:
                log.warning("%s is damaged: its first %s bytes are not what the run wrote", self.folder / name, size)

    def finish(self) -> None:
        """Have `close` mark the run as finished."""
        self._finished = True

    def fail(self, reason: str, text: str = "", *, stopped: bool = False, full: bool = False) -> None:
        """Record why the run ends before its last step.

        Args:
            reason: one line.
            text: details, such as a traceback.
            stopped: it was interrupted, and did not fail.
            full: the reason is a full disk; later failures to write are not reported.
        """
        self._full = full
        line = f"{'stopped' if stopped else 'failed'}: {mask_secrets(' '.join(reason.split()))}"
        text = mask_secrets(text)
        try:
            write_atomic(self.folder / ENDED, f"{line}\n\n{text}" if text else f"{line}\n")
        except OSError as error:  # a full disk, or a folder that was removed; the run's own error is more important
            if not full:
                log.warning("%s could not be written: %s", self.folder / ENDED, error)

    def close(self) -> None:
        """Write the report, also after an interruption."""
        self._progress.close()
        shutil.rmtree(self.recovery, ignore_errors=True)
        evaluated = [row for row in self.history if "eval/accuracy" in row]

        if evaluated:
            first = evaluated[0]
            last = evaluated[-1]
            log.info(
                f"held-out accuracy {first['eval/accuracy']:.3f} at step {first['step']:.0f}, "
                f"{last['eval/accuracy']:.3f} at step {last['step']:.0f}; results in {self.folder}"
            )

        for file in self._logs.values():
            with suppress(OSError):  # a full disk, which `_write` has raised
                file.close()

        # The error of a full disk must not hide the run's own, which is why all of this is caught.
        try:
            self._trace.close()
            state = "finished" if self._finished else last_state(self.folder)
            for point in entry_points(group=RUN_END) if self.history else ():
                point.load()(self.folder, state)
        except OSError as error:  # a full disk; the run's own error is more important
            if not self._full:
                log.warning("trace and report of %s could not be written: %s", self.folder, error)

        if self._finished:
            write_atomic(self.folder / FINISHED, "", durable=True)
        if self._trackers is not None:
            self._trackers.close()
