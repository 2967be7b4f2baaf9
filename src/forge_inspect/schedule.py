"""Reading and comparing schedules of runs, see `forge.observability.schedule`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.config.sections import ConfigError
from forge.observability.schedule import FORMAT, SCHEDULE, GroupEntry, SampleEntry, StepEntry, checksum_of
from forge.types import Spans


@dataclass(frozen=True)
class Schedule:
    """A whole schedule.

    Attributes:
        recipe: the loop that ran, "module:class".
        by_hand: what was passed from Python, which no file has: hooks, an environment.
        steps: by number, without a gap.
        published: the identity of the weights of each version that generators got.
        groups: all groups, dropped ones included, by the index of their prompt.
    """

    recipe: str
    by_hand: tuple[str, ...]
    steps: Mapping[int, StepEntry]
    published: Mapping[int, str]
    groups: Mapping[int, GroupEntry]


def read_schedule(folder: Path) -> Schedule:
    """Read and check the schedule of a run.

    Raises:
        ConfigError: it has none, or one that is damaged or was edited: names line and step.
    """
    path = folder / SCHEDULE
    if not path.is_file():
        raise ConfigError(f"{folder} has no {SCHEDULE}: it is not a run of RL, or of an earlier version")
    head: dict[str, Any] = {}
    steps: dict[int, StepEntry] = {}
    published: dict[int, str] = {}
    # A replay draws all samples of a prompt in one request, those that were dropped included.
    samples: dict[int, dict[int, SampleEntry]] = defaultdict(dict)
    for line in _lines(path):
        if "format" in line:
            head = line
        elif "published" in line:
            published[line["step"]] = line["published"]
        else:
            entry = StepEntry(line["step"], _groups(line["groups"]), _groups(line["dropped"]), line["numbers"])
            steps[entry.step] = entry
            for group in (*entry.groups, *entry.dropped):
                samples[group.index].update(group.samples)
    if not steps or head["format"] != FORMAT:
        raise ConfigError(f"{path} has no step, or is of another version of forge")
    groups = {index: GroupEntry(index, entries) for index, entries in samples.items()}
    return Schedule(head["recipe"], tuple(head["by_hand"]), steps, published, groups)


def find_difference(recorded: StepEntry, entry: StepEntry) -> str | None:
    """Return the first thing in which another entry of a step differs, in words; None if they are alike."""
    if [group.index for group in recorded.groups] != [group.index for group in entry.groups]:
        return f"it trained on the prompts {_indices(recorded)}, and now on {_indices(entry)}"
    for group, second_group in zip(recorded.groups, entry.groups, strict=True):
        if group.samples.keys() != second_group.samples.keys():
            return f"prompt {group.index} had samples {[*group.samples]}, and now {[*second_group.samples]}"
        for number, sample in group.samples.items():
            second_sample = second_group.samples[number]
            if sample.digest != second_sample.digest or sample.spans != second_sample.spans:
                versions = f"versions {_words(sample.spans)}, now {_words(second_sample.spans)}"
                return f"sample {number} of prompt {group.index} has other tokens or log-probabilities ({versions})"
            if sample.reward != second_sample.reward:
                return (
                    f"sample {number} of prompt {group.index} had the reward {sample.reward}, and now "
                    f"{second_sample.reward} for the same tokens"
                )
    for name, value in recorded.numbers.items():
        if value != entry.numbers.get(name):
            return f"{name} was {value!r}, and is {entry.numbers.get(name)!r} for the same rollouts"
    return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a schedule, each as the run wrote it."""
    for number, text in enumerate(path.read_text().splitlines(), 1):
        location = f"{path}, line {number}"
        try:
            line = json.loads(text)
            location = f"{location} (step {line['step']})"
            checksum = line.pop("checksum")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{location} is damaged: {text:.60}") from None
        # Of its contents: another program may have written the same line with other spaces.
        if checksum != checksum_of(json.dumps(line, separators=(",", ":"))):
            raise ConfigError(f"{location} is not what the run wrote: its checksum differs")
        yield line


def _groups(lists: list[Any]) -> tuple[GroupEntry, ...]:
    groups = []
    for index, reason, samples in lists:
        entries = {
            number: SampleEntry(tuple((int(version), int(count)) for version, count in spans), reward, digest)
            for number, spans, reward, digest in samples
        }
        groups.append(GroupEntry(int(index), entries, reason))
    return tuple(groups)


def _indices(entry: StepEntry) -> str:
    return ", ".join(str(group.index) for group in entry.groups)


def _words(spans: Spans) -> str:
    return " ".join(f"{version}x{count}" for version, count in spans) or "none"
