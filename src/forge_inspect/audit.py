"""The audit of a finished run: what became of each prompt and of each sampled token, counted from its files only.

It reads the rollouts of all groups (`metrics.rollouts: all`), otherwise the schedule, and shares no code with the
modules that train and count them.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from forge.observability.console import log
from forge.observability.folder import LOGS, MARK
from forge.observability.lines import Row, appended_lines, parse_line
from forge.observability.rollouts import ROLLOUTS, read_batches
from forge.observability.schedule import SCHEDULE
from forge.system.checksums import hash_file
from forge.system.files import write_atomic
from forge_inspect.alerts import AUDIT
from forge_inspect.runs import read_settings

COLUMNS = (*("step", "group", "sample", "branch", "reward", "version", "origins", "finish", "dropped", "length"),)
EMPTY = {"origins": "[]", "finish": None}  # columns of rollouts that a schedule does not have
IDLE = "zero_advantage"  # in the column "dropped" of groups that were trained without effect
SHOWN = 5  # examples that a fault names


@dataclass
class Audit:
    """Result of the audit of a run: counts, and the faults that were found.

    steps: number of the last step. faults: one line each; none if the files agree. counts: of groups and tokens, by
    what became of them.
    """

    steps: int = 0
    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Return whether the audit found no fault."""
        return not self.faults

    def json(self) -> str:
        """Return the audit as JSON."""
        return json.dumps(asdict(self) | {"is_sound": self.is_sound}, indent=1)


def print_audit(folder: str) -> None:
    """Print the audit of the run in a folder as JSON, in a process that may read the files of a stranger."""
    print(audit_run(Path(folder)).json())


def audit_run(folder: Path, by_schedule: bool = False) -> Audit:
    """Audit the run in a folder.

    Args:
        by_schedule: read the schedule even if all rollouts were recorded, as these take much longer to read.

    Raises:
        FileNotFoundError: the run has made no step.
        ValueError: the run has neither all rollouts nor a schedule.
    """
    if not (folder / MARK).is_file():
        raise FileNotFoundError(f"{folder} is not a run that has made a step")
    settings = read_settings(folder)
    history = _read_rows(folder / MARK)
    by_schedule = by_schedule or settings.get("metrics.rollouts") != "all"
    if by_schedule:
        rows = scheduled_rows(folder / SCHEDULE)
    else:
        rows = [
            row for _, batch in read_batches(folder / ROLLOUTS, (*COLUMNS, "versions")) for row in _read_batch(batch)
        ]

    if not rows or not history:
        raise ValueError(
            f"{folder} has neither a schedule nor all rollouts to audit: audit a run of forge.recipes.rl with "
            "metrics.rollouts all"
        )
    auditor = _Auditor(rows, history, settings, by_schedule)
    auditor.check_steps()
    auditor.check_episodes()
    auditor.check_prompts()
    auditor.check_versions()
    auditor.check_tokens()

    # Compare the files with their checksums at the last checkpoint, if there was one.
    path = folder / LOGS
    for line in path.read_text().splitlines() if path.exists() else ():
        if not line.startswith("#"):
            expected, size, name = line.split(" ", 2)
            if "/" in name:
                raise ValueError(f"{path} names {name}, which is not a file of the run")
            if hash_file(folder / name, int(size)).hexdigest() != expected:
                auditor.fault(f"{name} is not what the run wrote: its first {size} bytes have another checksum")

    return auditor.result


def audit_ended_run(folder: Path, state: str) -> None:
    """Audit a run that ends and has a schedule, write the audit to its folder, and log the faults as warnings."""
    path = folder / SCHEDULE
    if not path.exists() or not path.stat().st_size:
        return

    # By the schedule, which is some kB a step: all rollouts of a run may be many GB.
    try:
        result = audit_run(folder, by_schedule=True)
    except ValueError:  # it trained no step, or its loop writes none
        return

    write_atomic(folder / AUDIT, result.json())
    for fault in result.faults:
        log.warning("audit: %s", fault)


def scheduled_rows(path: Path) -> list[Row]:
    """Return the samples in a schedule as rows with the columns of recorded rollouts, those of `EMPTY` without a value.

    The list is empty if there is no file.
    """
    rows: list[Row] = []
    for line in _read_rows(path):
        for index, reason, samples in (*line.get("groups", ()), *line.get("dropped", ())):
            for number, spans, reward, _ in samples:
                versions = [version for version, _ in spans]
                identity = {"step": line["step"], "group": index, "sample": number, "branch": 0}
                tokens = {"length": sum(count for _, count in spans), "versions": versions}
                rows.append({**identity, **tokens, "reward": reward, "dropped": reason or None, **EMPTY})
    return rows


def _read_batch(batch: Any) -> list[Row]:
    """Return the rows of an Arrow batch, each with the distinct versions of its tokens.

    A Python number for each token of a long run would not fit into memory.
    """
    distinct = [tokens.values.unique().to_pylist() for tokens in batch["versions"]]
    return [
        row | {"versions": numbers} for row, numbers in zip(batch.select(COLUMNS).to_pylist(), distinct, strict=True)
    ]


def _read_rows(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; none if it does not exist. ValueError: a line is damaged."""
    rows = [parse_line(line) for _, line in appended_lines(path)]
    if None in rows:
        raise ValueError(f"{path} is damaged in line {rows.index(None) + 1}")
    return [row for row in rows if row is not None]


class _Auditor:
    def __init__(
        self, rows: Sequence[Row], history: Sequence[Mapping[str, float]], settings: Row, by_schedule: bool
    ) -> None:
        self.history, self.settings, self.by_schedule = history, settings, by_schedule
        last = int(history[-1]["step"]) if history else 0
        self.result = Audit(last)
        # Of a step that was interrupted the rollouts may be there without its metrics: a resume removes them.
        self.rows = [row for row in rows if row["step"] <= last]
        self.trained = [row for row in self.rows if row["dropped"] in (None, IDLE)]
        self.dropped = [row for row in self.rows if row["dropped"] not in (None, IDLE)]
        self.batch_size = int(settings["training.batch_size"])
        self.fault = self.result.faults.append

    def fault_if(self, numbers: Sequence[Any], text: str) -> None:
        """Add a fault if the list of affected numbers is not empty; the fault names the first of them."""
        if numbers:
            examples = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
            self.fault(f"{text}: {examples}")

    def check_steps(self) -> None:
        """Check that no step is missing, and that each trained `training.batch_size` groups."""
        steps = [int(row["step"]) for row in self.history]
        if steps[0] > 1 or steps != list(range(steps[0], steps[0] + len(steps))):
            self.fault_if(steps, "steps of metrics.jsonl are missing, doubled or out of order")
        counts = Counter(step for step, _ in {(row["step"], row["group"]) for row in self.trained})
        for step in steps:
            if step and counts[step] != self.batch_size:
                self.fault(f"step {step} trained {counts[step]} groups, and training.batch_size is {self.batch_size}")

    def check_episodes(self) -> None:
        """Check that no episode was trained twice, no group in two steps, and none that is unscored or failed."""
        episodes = Counter((row["group"], row["sample"], row["branch"]) for row in self.trained)
        doubled = [key for key, count in episodes.items() if count > 1]
        self.fault_if(doubled, "episodes (group, sample, branch) were trained twice")
        steps = Counter(group for group, _ in {(row["group"], row["step"]) for row in self.trained})
        self.fault_if([group for group, count in steps.items() if count > 1], "groups were trained in several steps")
        for column, value, kind in (("reward", None, "without a reward"), ("finish", "infrastructure", "that failed")):
            untrainable = [(row["group"], row["sample"]) for row in self.trained if row[column] == value]
            self.fault_if(untrainable, f"episodes {kind} were trained (group, sample)")

    def check_prompts(self) -> None:
        """Check that each prompt was trained, was dropped for a counted reason, or was in flight at the end."""
        trained = {row["group"] for row in self.trained}
        # A group may be in both: its unscored episodes are recorded as dropped, and the others train.
        dropped = {row["group"]: row["dropped"] for row in self.dropped if row["group"] not in trained}
        known = sorted({-1, *trained, *dropped})
        # As ranges, which take no memory: a number of a damaged file may be anything.
        gaps = [range(before + 1, after) for before, after in pairwise(known)]
        missing = sum(map(len, gaps))
        self.fault_if([group for group in known if group < -1], "groups have no valid number")
        counted: Counter[str] = Counter()
        for row in self.history:
            counted.update(
                {
                    name.removeprefix("dropped/"): round(count)
                    for name, count in row.items()
                    if name.startswith("dropped/")
                }
            )

        # Groups that no row stands for: all rollouts do not have those that a resume could not hand out again, and a
        # schedule does not list some dropped ones.
        groups = counted.total() - counted["unscored_episodes"]
        unlisted = max(0, groups - len(dropped)) if self.by_schedule else counted["forgotten"]

        # The buffer holds at most the groups of `max_policy_age + 1` steps, and as many are being generated.
        in_flight = 2 * self.batch_size * (int(self.settings.get("async.max_policy_age") or 0) + 1)
        self.result.counts |= {
            "groups trained": len(trained),
            "groups dropped": len(dropped),
            "groups in flight at the end or not recorded": missing,
        }
        first = list(islice(chain.from_iterable(gaps), SHOWN + 1))
        if missing > in_flight + unlisted:
            self.fault_if(first, f"{missing} prompts were neither trained nor dropped")

        # Groups are handed out in order, so a missing group far before the last trained one cannot be in flight.
        oldest = max(trained, default=-1) - in_flight - len(dropped)
        lost = sum(len(range(gap.start, min(gap.stop, oldest))) for gap in gaps)
        if lost > unlisted:
            self.fault_if(first[:lost], "prompts that were handed out long before the end never came back")

        for reason, number in sorted(Counter(dropped.values()).items()):
            self.result.counts[f"groups dropped: {reason}"] = number
            if number > counted[reason]:
                self.fault(f"{number} groups were dropped as {reason}, and metrics.jsonl counts {counted[reason]}")

    def check_versions(self) -> None:
        """Check that no token is older than allowed or of a later version than the step, and that all replicas sampled
        with the same weights of a version."""
        bound = self.settings.get("async.max_training_age")
        bound = self.settings.get("async.max_policy_age") if bound is None else bound
        for row in self.trained:
            latest = row["step"] - 1
            versions = [number for number in row["versions"] if number >= 0] or [latest]
            text = f"step {row['step']} trained tokens of version"
            if bound is not None and latest - min(versions) > bound:
                self.fault(f"{text} {min(versions)}: the bound is {bound}")
                break
            if max(versions) > latest:
                self.fault(f"{text} {max(versions)}, which it was to make")
                break

        origins = {(version, name) for row in self.rows for version, name, _ in json.loads(row["origins"]) if name}
        names = Counter(version for version, _ in origins if version >= 0)

        # A resumed run samples again with versions that it had lost, from the same weights.
        several = sorted(version for version, count in names.items() if count > 1)
        self.fault_if(several, "versions have several identities of weights")

    def check_tokens(self) -> None:
        """Check that each step trained as many sampled tokens as its metrics count."""
        tokens: Counter[int] = Counter()
        for row in self.trained:
            tokens[row["step"]] += row["length"]
        for metrics in self.history:
            step = int(metrics["step"])
            counted = metrics.get("generation/tokens", tokens[step])
            if step and not math.isclose(tokens[step], counted, rel_tol=1e-6):
                self.fault(f"step {step} trained {tokens[step]} sampled tokens, and metrics.jsonl counts {counted:.0f}")
        self.result.counts["tokens trained"] = tokens.total()
        self.result.counts["tokens dropped"] = sum(row["length"] for row in self.dropped)
