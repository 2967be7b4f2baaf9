"""The folder of a run, and all that is written to it."""

import json
import os
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
from ..system.checksums import DamagedFile, hash_file, read_sealed, write_sealed
from ..system.files import make_private, room_for, write_atomic
from ..system.masking import mask_secrets, without_secrets
from ..types import Batch, Episode, Group, Sample
from .console import Progress, configure_logging, log
from .folder import CONFIG, ENDED, FINISHED, LOGS, MARK, check_free, clear_run, cut_lines, last_state
from .lines import Row
from .machine import measure_gpus, measure_room
from .metrics import Clock, Snapshot, phase
from .rollouts import HELD_OUT, ROLLOUTS, RolloutLog, cut_rollouts as cut_rollouts, held_out_lines
from .schedule import NUMBERS, SCHEDULE, GroupEntry, StepEntry, header_line, published_line
from .trace import TRACE, Trace

# Entry points of extensions, `f(folder, state)`, called when a run ends; the state is finished, failed or stopped.
RUN_END = "forge.run_end"
RUN_LOOK = "forge.run_look"  # called with the run's folder after step FIRST_LOOK
FIRST_LOOK = 10
Evaluated = tuple[Sequence[Sample], Sequence[Episode], str]  # problems, the answers to them, and the name of the set
FLAT_STEPS = 20  # steps with a reward of 0 throughout, after which a warning names the probable cause


class Run:
    """Run directory `<root>/<name>/` and the files that are written to it: config.yaml, metrics.jsonl, rollouts.arrow,
    schedule.jsonl, trace.json, report.html; the trainer adds checkpoints/ and model/, and trackers their own files.

    Args:
        config: the resolved configuration, plain data. Its section `metrics` names the trackers. Secrets are removed
            before it is written.
        steps: number of training steps, for the progress bar.
        overwrite: remove an earlier run of this name.
        resume: the checkpoint that the run resumes from: records after it are removed, whatever `overwrite` is. None:
            the run starts at step 0.
        start: the step of that checkpoint.
        peak: TFLOP/s of one device, see `forge.models.flops`; None if unknown.

    Attributes:
        folder: the run's folder.
        history: the rows of metrics.jsonl so far.
        checkpoints: path of the checkpoints' folder.
        model: path of the exported model.
        best: path of the model that was best by `eval.best`.

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
        self.resume, self.start, self.peak = resume, start, peak
        self.history: list[dict[str, float]] = []

        if resume:
            self._check_logs()
            # Records after the checkpoint are removed, since these steps are computed again.
            self.history = cut_lines(self.folder / MARK, start)
            cut_rollouts(self.folder / ROLLOUTS, start)
            cut_lines(self.folder / HELD_OUT, start)
            cut_lines(self.folder / SCHEDULE, start)
        else:
            check_free(self.folder, overwrite)
            if (self.folder / MARK).exists():
                clear_run(self.folder)
            make_private(self.folder)

        self.checkpoints = str(self.folder / "checkpoints")
        self.model = str(self.folder / "model")
        self.best = str(self.folder / "best")

        # An earlier attempt of a resumed run has recorded how it ended.
        for ending in (FINISHED, ENDED):
            (self.folder / ending).unlink(missing_ok=True)

        write_sealed(self.folder / CONFIG, yaml.safe_dump(without_secrets(config), sort_keys=False))
        self._logs = {name: (self.folder / name).open("ab") for name in (MARK, ROLLOUTS, HELD_OUT, SCHEDULE)}
        self._digests = {name: hash_file(self.folder / name) for name in self._logs}
        self._trace = Trace(self.folder / TRACE)
        self._rollouts: RolloutLog | None = None
        self._evaluated: list[Evaluated] = []
        if resume:
            self.sync()  # the last checksums may cover rows that were removed

        self._trackers: Any = None
        metrics = config.get("metrics", {})
        if any(map(metrics.get, ("tensorboard", "wandb", "tracker"))):
            self._trackers = resolve("forge_trackers:Delivery", "metrics")(self.folder, metrics, config, start)
        configure_logging()

        self._progress = Progress(name, steps, start)
        self._finished, self._full = False, False
        self._settings = flatten_config(config)
        self._clock = Clock()
        self._warned_flat = False
        self._last = time.perf_counter()
        self._started = self._last - (self.history[-1]["seconds"] if self.history else 0.0)

    def describe_start(self) -> str | None:
        """Return the activity of the run before its first step as text; None once the first step is logged."""
        if not self.history or (self.start and self.history[-1]["step"] == self.start):
            return "starting the processes, which load the model"
        return "in the first step" if self.history[-1]["step"] == self.start else None

    def describe_saved(self) -> str:
        """Return how far an unfinished run is saved, and how it continues, as one line."""
        steps = [path.name.removeprefix("step_") for path in Path(self.checkpoints).glob("step_*")]
        if (saved := max((int(step) for step in steps if step.isdigit()), default=None)) is None:
            return f"{self.folder}: no checkpoint was written (checkpoint.every), so it starts again from step 0"

        steps_done = int(self.history[-1]["step"]) if self.history else saved
        return (
            f"{self.folder} ended after step {steps_done} and is saved up to step {saved}: --resume auto "
            '(from Python resume="auto") continues it'
        )

    def model_of(self, policy: str) -> str:
        """Return the path of a policy's exported model, where a run has several; that of the policy "policy" is
        `model`."""
        return self.model if policy == "policy" else str(self.folder / f"model-{policy}")

    def steps(self, end: int) -> Iterator[int]:
        """Yield the version of the weights that each remaining step trains, up to `end` - 1.

        From here on the run measures how long the current task is in each phase: the metrics `wall/<phase>`, in
        seconds.
        """
        self._clock.start()
        if self.start:  # the start-up time of a resumed run belongs to no row
            self._last = time.perf_counter()
        yield from range(self.start, end)

    def log(self, step: int, snapshot: Snapshot, **values: float) -> dict[str, float]:
        """Write the row of a step, with the answers to held-out problems that wait for it, and return the row.

        Args:
            snapshot: what all processes have recorded since the last row.
            **values: additional metrics. Rates and resources are added to them; `wall/accounted` is the share of the
                time since the last row that is spent in some phase.
        """
        with phase("log"):
            now = time.perf_counter()
            seconds = now - self._last
            self._last = now
            row = {"step": float(step), "seconds": now - self._started, **snapshot.values(), **values}
            row["seconds/step"] = seconds

            # The wall time of the step by phase, and rates.
            if phases := self._clock.take():
                row |= {f"wall/{name}": duration for name, duration in phases.items()}
                row["wall/accounted"] = sum(phases.values()) / seconds
            row["generation/tokens_per_second"] = row.get("generation/tokens", 0.0) / seconds
            if row.get("seconds/train"):
                row["train/tokens_per_second"] = row.get("train/tokens", 0.0) / row["seconds/train"]
            row |= self._usage_metrics(snapshot, row) | measure_room(self.folder) | measure_gpus()

            # First the file of metrics: a step counts as done once its line is there.
            self.history.append(row)
            rounded = {name: float(f"{value:.8g}") for name, value in row.items()}
            self._write_log(MARK, f"{json.dumps(rounded)}\n".encode())
            for evaluated in self._evaluated:
                self._write_log(HELD_OUT, held_out_lines(step, *evaluated))
            self._evaluated = []
            self._trace.write(snapshot, step, row)
            self._progress.update(step, row)
            for point in entry_points(group=RUN_LOOK) if step == FIRST_LOOK else ():
                point.load()(self.folder)

            # A reward that is always 0 is a mistake of the setup, and would waste the whole run.
            last_rows = self.history[-FLAT_STEPS:]
            flat_rows = [past for past in last_rows if past.get("reward") == 0 and past.get("reward/std") == 0]
            if len(flat_rows) == FLAT_STEPS and not self._warned_flat:
                self._warned_flat = True
                truncated = sum(past["generation/truncated"] for past in flat_rows) / FLAT_STEPS
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
        """Return the metrics of resources: CPU-seconds of the run so far, CPU-seconds and MB of each service in this
        step, TFLOP/s and MFU."""
        metrics = {"cpu_seconds": self.history[-1].get("cpu_seconds", 0.0) if self.history else 0.0}
        for use in snapshot.usage:
            # The process of a replica has the service's name with a number, such as generator_1.
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
            "train": self._settings.get("services.trainer.procs") or 1,
            "generator": self._settings.get("services.generator.num_replicas") or 1,
        }
        for name, duration in seconds.items():
            if duration and row.get(f"{name}/flops"):
                metrics[f"{name}/tflops"] = row[f"{name}/flops"] / duration / 1e12
                if self.peak:
                    metrics[f"{name}/mfu"] = metrics[f"{name}/tflops"] / (self.peak * devices[name])

        return metrics

    def keep_evaluation(self, samples: Sequence[Sample], episodes: Sequence[Episode], name: str = "") -> None:
        """Keep the answers to held-out problems until `log` writes them with the row of their step.

        Args:
            samples: the problems, one for each of `episodes`.
            name: of their set; "" for the section `eval` itself.
        """
        self._evaluated.append((samples, episodes, name))

    def record(self, groups: int | Literal["all"], max_bytes: float, spell: Callable[[int], str]) -> None:
        """Start recording rollouts to rollouts.arrow.

        Args:
            groups: number of groups of each step that are recorded.
            max_bytes: size of the file at which recording stops.
            spell: returns the text of a token.
        """
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
        """Append the rollouts of a step to rollouts.arrow; takes the arguments of `RolloutLog.add`."""
        with phase("log_rollouts"):
            if self._rollouts is not None:
                self._rollouts.add(step, groups, batch, trained, dropped)

    def begin_schedule(self, recipe: str, by_hand: Sequence[str]) -> None:
        """Write the first line of the schedule, unless the run was resumed and has it.

        Args:
            recipe: the loop, "module:class".
            by_hand: names of the objects that were passed from Python, which a replay cannot read from a file.
        """
        if not (self.folder / SCHEDULE).stat().st_size:
            self._write_log(SCHEDULE, f"{header_line(recipe, by_hand)}\n".encode())

    def schedule_entry(self, step: int, groups: Sequence[Group]) -> StepEntry:
        """Return the entry of a step for `log_schedule`. It is made before penalties change the groups' rewards."""
        with phase("log_rollouts"):
            return StepEntry(step, tuple(map(GroupEntry.from_group, groups)))

    def log_published(self, version: int, identity: str) -> None:
        """Write to the schedule that the weights of a version are published; `identity` is their digest."""
        self._write_log(SCHEDULE, f"{published_line(version, identity)}\n".encode())

    def log_schedule(
        self, entry: StepEntry, dropped: Sequence[tuple[str, Group]], metrics: Mapping[str, float]
    ) -> StepEntry:
        """Write the entry of a step to the schedule, and return it complete.

        Args:
            entry: from `schedule_entry`.
            dropped: (reason, group) of each group that was dropped since the last step.
            metrics: of the step, from the trainer.
        """
        with phase("log_rollouts"):
            step_numbers = {name: float(metrics[name]) for name in NUMBERS if name in metrics}
            dropped_groups = tuple(GroupEntry.from_group(group, reason) for reason, group in dropped)
            whole_entry = replace(entry, dropped=dropped_groups, numbers=step_numbers)
            self._write_log(SCHEDULE, f"{whole_entry.line()}\n".encode())
        return whole_entry

    def sync(self) -> None:
        """Write the logs through to the disk (fsync), with a file of their checksums: after a power cut they must have
        all steps of a checkpoint."""
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
        """Compare the logs with their checksums at the last checkpoint. Damage is only a warning, since training does
        not read them."""
        try:
            rows = [line.split(" ", 2) for line in read_sealed(self.folder / LOGS).splitlines()]
        except DamagedFile as error:
            log.warning("%s: damage to the logs before this checkpoint cannot be detected", error)
            return

        for expected, size, name in rows:
            path = self.folder / name
            if not path.exists() or hash_file(path, int(size)).hexdigest() != expected:
                log.warning("%s is damaged: its first %s bytes are not what the run wrote", self.folder / name, size)

    def finish(self) -> None:
        """Record that the run is complete, so that `close` marks it as finished."""
        self._finished = True

    def fail(self, reason: str, text: str = "", *, stopped: bool = False, full: bool = False) -> None:
        """Write to the run's folder why it ends before its last step.

        Args:
            reason: one line.
            text: details, such as a traceback; "" for none.
            stopped: whether the run was interrupted, and did not fail.
            full: whether the reason is a full disk; then later failures to write are not reported.
        """
        self._full = full
        line = f"{'stopped' if stopped else 'failed'}: {mask_secrets(' '.join(reason.split()))}"
        text = mask_secrets(text)
        try:
            write_atomic(self.folder / ENDED, f"{line}\n\n{text}" if text else f"{line}\n")
        except OSError as error:  # only a warning: the run's own error is more important
            if not full:
                log.warning("%s could not be written: %s", self.folder / ENDED, error)

    def close(self) -> None:
        """Close all files, and write the report; also after an interruption."""
        self._progress.close()
        evaluated = [row for row in self.history if "eval/accuracy" in row]
        first_and_last = evaluated[:1] + evaluated[1:][-1:]
        accuracies = [f"{row['eval/accuracy']:.3f} at step {row['step']:.0f}" for row in first_and_last]
        results = [f"held-out accuracy {', '.join(accuracies)}"] if accuracies else []
        results += [f"model in {self.model}"] if self._finished and Path(self.model).is_dir() else []
        if self.history:
            log.info("%s", "; ".join([*results, f"results in {self.folder}"]))

        for file in self._logs.values():
            with suppress(OSError):  # of a full disk, which writing has raised already
                file.close()

        # A full disk here is only a warning, since its error would hide the run's own.
        try:
            self._trace.close()
            state = "finished" if self._finished else last_state(self.folder)
            for point in entry_points(group=RUN_END) if self.history else ():
                point.load()(self.folder, state)
        except OSError as error:
            if not self._full:
                log.warning("trace and report of %s could not be written: %s", self.folder, error)

        if self._finished:
            write_atomic(self.folder / FINISHED, "", durable=True)
        if self._trackers is not None:
            self._trackers.close()
