"""The audit of a finished run: what became of each prompt and of each sampled token, counted from its files alone.

It reads the rollouts of all groups (`metrics.rollouts: all`), otherwise the schedule, and shares no code with what
trains and counts them.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

from forge.config.sections import flat
from forge.config.yaml_files import parse_yaml
from forge.observability.console import log
from forge.observability.folder import CONFIG, LOGS, MARK, digest
from forge.observability.rollouts import ROLLOUTS, batches
from forge.observability.schedule import SCHEDULE
from forge.system.files import write_atomic
from forge_inspect.alerts import AUDIT

COLUMNS = (
    "step",
    "group",
    "sample",
    "branch",
    "reward",
    "version",
    "origins",
    "finish",
    "dropped",
    "length",
    "versions",
)
EMPTY = {"origins": "[]", "finish": None}  # what a schedule does not say of a sample
# Reasons that depend on the reward: what they drop differs by design.
BY_REWARD = ("no_signal",)
IDLE = "zero_advantage"
# A bias that is worth a fault: the chance that a dropped episode is longer (or better paid) than a trained one is then
# below .35 or above .65, and it would come by accident once in a thousand runs.
EFFECT, LEVEL = 0.3, 0.001
SHOWN = 5  # numbers that a fault names


@dataclass
class Audit:
    """What an audit has counted.

    faults: one line each; none if the run is what it says.
    counts: groups and tokens, by what became of them.
    biases: by reason and quantity, the effect size (-1 to 1) and the probability of one as large by accident.
    """

    steps: int = 0
    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    biases: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def json(self) -> str:
        """The audit as JSON."""
        return json.dumps(asdict(self) | {"is_sound": self.is_sound}, indent=1)


def audit(folder: Path, by_schedule: bool = False) -> Audit:
    """Audit the run in a folder.

    Args:
        by_schedule: read the schedule even if all rollouts were recorded, which takes much longer to read.

    Raises:
        ValueError: it cannot be audited: it has no step, or neither all rollouts nor a schedule.
    """
    settings = flat(parse_yaml((folder / CONFIG).read_text(), folder / CONFIG))
    history = [json.loads(line) for line in (folder / MARK).read_text().splitlines()]
    by_schedule = by_schedule or settings.get("metrics.rollouts") != "all"
    if by_schedule:
        rows = scheduled_rows(folder / SCHEDULE)
    else:
        rows = [row for _, batch in batches(folder / ROLLOUTS, COLUMNS) for row in batch.to_pylist()]
    if not rows:
        raise ValueError(f"{folder} has neither a schedule nor all rollouts: it trained no step of forge.recipes.rl")
    result = Audit(steps=int(history[-1]["step"]) if history else 0)
    counter = _Counter(rows, history, settings, result, by_schedule)
    for check in (
        counter.steps,
        counter.batches,
        counter.once,
        counter.coverage,
        counter.scores,
        counter.ages,
        counter.identities,
        counter.tokens,
        counter.bias,
    ):
        check()
    _check_logs(folder, result)
    return result


def audit_ended_run(folder: Path, state: str) -> None:
    """Write the audit of a run that has a schedule, and log its faults as warnings."""
    path = folder / SCHEDULE
    if not path.exists() or not path.stat().st_size:
        return

    # By the schedule, which is some kB a step: all rollouts of a run may be many GB.
    try:
        result = audit(folder, by_schedule=True)
    except ValueError:  # it trained no step, or its loop writes none
        return

    write_atomic(folder / AUDIT, result.json())
    for fault in result.faults:
        log.warning("audit: %s", fault)


def scheduled_rows(path: Path) -> list[dict[str, Any]]:
    """The samples that a schedule lists, in the form of recorded rollouts; what those have beyond it is empty."""
    rows: list[dict[str, Any]] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        for index, reason, samples in (*line.get("groups", ()), *line.get("dropped", ())):
            for number, spans, reward, _ in samples:
                versions = [version for version, _ in spans]
                identity = {"step": line["step"], "group": index, "sample": number, "branch": 0}
                tokens = {"length": sum(count for _, count in spans), "versions": versions}
                rows.append({**identity, **tokens, "reward": reward, "dropped": reason or None, **EMPTY})
    return rows


class _Counter:
    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        history: Sequence[Mapping[str, float]],
        settings: Any,
        result: Audit,
        by_schedule: bool,
    ) -> None:
        self.history, self.settings, self.result = history, settings, result
        self.by_schedule = by_schedule
        # Of a step that was interrupted the rollouts may be there without its metrics: a resume removes them.
        last = int(history[-1]["step"]) if history else 0
        self.rows = rows = [row for row in rows if row["step"] <= last]
        self.trained = [row for row in rows if row["dropped"] in (None, IDLE)]
        self.dropped = [row for row in rows if row["dropped"] not in (None, IDLE)]
        self.batch_size = int(settings["training.batch_size"])

    def fault(self, text: str, numbers: Sequence[Any] = ()) -> None:
        """Add a fault, with the first of the numbers that it is about."""
        examples = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
        self.result.faults.append(f"{text}: {examples}" if numbers else text)

    def steps(self) -> None:
        """Rows of metrics count from 0 or 1 without a gap."""
        steps = [int(row["step"]) for row in self.history]
        if steps != list(range(steps[0], steps[0] + len(steps))) or steps[0] > 1:
            self.fault("steps of metrics.jsonl are missing, doubled or out of order", steps)

    def batches(self) -> None:
        """Each step trains as many groups as it should."""
        groups = defaultdict(set)
        for row in self.trained:
            groups[row["step"]].add(row["group"])
        for row in self.history:
            step = int(row["step"])
            if step and len(groups[step]) != self.batch_size:
                self.fault(
                    f"step {step} trained {len(groups[step])} groups, and training.batch_size is {self.batch_size}"
                )

    def once(self) -> None:
        """No episode is trained twice, and no group in two steps."""
        episodes = Counter((row["group"], row["sample"], row["branch"]) for row in self.trained)
        doubled = [key for key, count in episodes.items() if count > 1]
        if doubled:
            self.fault("episodes (group, sample, branch) were trained twice", doubled)
        steps = defaultdict(set)
        for row in self.trained:
            steps[row["group"]].add(row["step"])
        again = [group for group, trained in steps.items() if len(trained) > 1]
        if again:
            self.fault("groups were trained in several steps", again)

    def coverage(self) -> None:
        """Each prompt was trained, was dropped for a counted reason, or was in flight at the end."""
        trained = {row["group"] for row in self.trained}
        # Of a group with unscored episodes these are recorded as dropped, and the others train.
        dropped = {row["group"]: row["dropped"] for row in self.dropped if row["group"] not in trained}
        accounted = trained | dropped.keys()
        missing = sorted(set(range(max(accounted) + 1)) - accounted)
        counted = self._sum("dropped/")
        # What a resume could not hand out again; and of a schedule the dropped groups that it does not list.
        groups = sum(number for reason, number in counted.items() if reason != "unscored_episodes")
        unlisted = max(0, groups - len(dropped)) if self.by_schedule else counted.get("forgotten", 0)
        self.result.counts |= {"groups trained": len(trained), "groups dropped": len(dropped)}
        age = int(self.settings.get("async.max_policy_age") or 0)
        # What the buffer admits, and as much again that it holds.
        in_flight = 2 * self.batch_size * (age + 1)
        self.result.counts["groups in flight at the end or not recorded"] = len(missing)
        if len(missing) > in_flight + unlisted:
            self.fault(f"{len(missing)} prompts were neither trained nor dropped", missing)
        early = [group for group in missing if group < max(trained) - in_flight - len(dropped)]
        if len(early) > unlisted:
            self.fault("prompts that were handed out long before the end never came back", early)
        for reason, number in sorted(Counter(dropped.values()).items()):
            self.result.counts[f"groups dropped: {reason}"] = number
            if number > counted.get(reason, 0):
                self.fault(
                    f"{number} groups were dropped as {reason}, and metrics.jsonl counts {counted.get(reason, 0)}"
                )

    def scores(self) -> None:
        """Nothing unscored, and nothing that failed, has a part in a gradient."""
        unscored = [(row["group"], row["sample"]) for row in self.trained if row["reward"] is None]
        if unscored:
            self.fault("episodes without a reward were trained (group, sample)", unscored)
        failed = [(row["group"], row["sample"]) for row in self.trained if row["finish"] == "infrastructure"]
        if failed:
            self.fault("episodes that failed were trained (group, sample)", failed)

    def ages(self) -> None:
        """No token is older than allowed, or of a version that was not there yet."""
        bound = self.settings.get("async.max_training_age")
        bound = self.settings.get("async.max_policy_age") if bound is None else bound
        for row in self.trained:
            version = row["step"] - 1
            versions = [number for number in row["versions"] if number >= 0]
            if versions and bound is not None and version - min(versions) > bound:
                self.fault(f"step {row['step']} trained tokens of version {min(versions)}: the bound is {bound}")
                return
            if versions and max(versions) > version:
                self.fault(f"step {row['step']} trained tokens of version {max(versions)}, which it was to make")
                return

    def identities(self) -> None:
        """A version has one identity, whichever replica sampled with it."""
        identities = defaultdict(set)
        for row in self.rows:
            for version, identity, _ in json.loads(row["origins"]):
                if version >= 0 and identity:
                    identities[version].add(identity)
        several = [version for version, names in sorted(identities.items()) if len(names) > 1]
        # A resumed run samples again with versions that it had lost, from the same weights.
        if several:
            self.fault("versions have several identities of weights", several)

    def tokens(self) -> None:
        """The sampled tokens of a step's groups are those that its metrics count."""
        lengths: Counter[int] = Counter()
        for row in self.trained:
            lengths[row["step"]] += row["length"]
        for row in self.history:
            step = int(row["step"])
            counted = row.get("generation/tokens")
            if step and counted is not None and not math.isclose(lengths[step], counted, rel_tol=1e-6):
                self.fault(
                    f"step {step} trained {lengths[step]} sampled tokens, and metrics.jsonl counts {counted:.0f}"
                )
        self.result.counts["tokens trained"] = sum(lengths.values())
        self.result.counts["tokens dropped"] = sum(row["length"] for row in self.dropped)

    def bias(self) -> None:
        """What was dropped is not longer, shorter, better or worse than what was trained."""
        for reason in sorted({row["dropped"] for row in self.dropped} - set(BY_REWARD)):
            rows = [row for row in self.dropped if row["dropped"] == reason]
            for name in ("length", "reward"):
                left_out = [row[name] for row in rows if row[name] is not None]
                trained = [row[name] for row in self.trained if row[name] is not None]
                if len(left_out) < 10:
                    continue
                effect, probability = rank_effect(left_out, trained)
                self.result.biases[f"{reason}/{name}"] = (effect, probability)
                if abs(effect) > EFFECT and probability < LEVEL:
                    more = {"length": "longer", "reward": "better paid"}[name]
                    direction = more if effect > 0 else {"length": "shorter", "reward": "worse paid"}[name]
                    self.fault(
                        f"the {len(left_out)} episodes dropped as {reason} are {direction} than those that trained "
                        f"(rank effect {effect:.2f}, p {probability:.1g})"
                    )

    def _sum(self, prefix: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for row in self.history:
            for name, value in row.items():
                if name.startswith(prefix):
                    sums[name.removeprefix(prefix)] += value
        return sums


def rank_effect(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """How much larger the values of one sample are (Mann and Whitney 1947).

    Returns:
        the probability that a value of `first` exceeds one of `second`, less the opposite one (-1 to 1); and the
        two-sided probability of an effect as large by accident, by the normal approximation with ties.
    """
    ordered = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks_of_first = 0.0
    ties = 0.0
    for start, end in _runs([value for value, _ in ordered]):
        rank = (start + end + 1) / 2  # the mean of the ranks from start + 1 to end
        ranks_of_first += rank * sum(1 for _, sample in ordered[start:end] if sample == 0)
        ties += (end - start) ** 3 - (end - start)
    count, other = len(first), len(second)
    both = count + other
    wins = ranks_of_first - count * (count + 1) / 2
    effect = 2 * wins / (count * other) - 1
    variance = count * other / 12 * (both + 1 - ties / (both * (both - 1)))
    if variance <= 0:  # all values are equal
        return 0.0, 1.0
    z = (wins - count * other / 2) / math.sqrt(variance)
    return effect, 2 * NormalDist().cdf(-abs(z))


def _runs(values: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Ranges of equal values in a sorted list."""
    start = 0
    for number in range(1, len(values) + 1):
        if number == len(values) or values[number] != values[start]:
            yield start, number
            start = number


def _check_logs(folder: Path, result: Audit) -> None:
    """Compare the files with their checksums at the last checkpoint, if there was one."""
    path = folder / LOGS
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        expected, size, name = line.split(" ", 2)
        if digest(folder / name, int(size)).hexdigest() != expected:
            result.faults.append(f"{name} is not what the run wrote: its first {size} bytes have another checksum")
