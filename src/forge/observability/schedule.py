"""The schedule of a run in `schedule.jsonl`: what its steps trained on, and which weights drew which token.

With the run's configuration it determines every bit that the run computed: `forge replay` computes them again.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress, groupby
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from ..types import Episode, Group, Spans
from ..types.sampling import are_spans

SCHEDULE = "schedule.jsonl"
FORMAT = 1
NUMBERS = ("train/loss", "train/grad_norm", "critic/loss")  # of a step, as the trainer returned them


class BadSchedule(ValueError):
    """A schedule that no run can have written: names the line and its step."""


@dataclass(frozen=True)
class SampleEntry:
    """One episode of a group: who drew its tokens, its reward, and a digest of tokens and log-probabilities."""

    spans: Spans
    reward: float | None
    digest: str

    @classmethod
    def of(cls, episode: Episode) -> SampleEntry:
        """The entry of an episode, its branches included."""
        digest = blake2b(digest_size=8)
        versions: list[int] = []
        for branch in (*episode.branches, episode):
            # Not numpy: of some ten tokens it takes twice as long.
            digest.update(array("q", branch.tokens))
            digest.update(array("d", branch.logprobs or ()))
            versions += compress(branch.versions, branch.mask)
        if len({*versions}) == 1:
            spans: Spans = ((versions[0], len(versions)),)
        else:
            spans = tuple((version, len([*tokens])) for version, tokens in groupby(versions))
        return cls(spans, episode.outcome, digest.hexdigest())


@dataclass(frozen=True)
class GroupEntry:
    """The episodes of a prompt by their numbers; `reason` says why they were dropped, "" that they trained."""

    index: int
    samples: Mapping[int, SampleEntry]
    reason: str = ""

    @classmethod
    def of(cls, group: Group, reason: str = "") -> GroupEntry:
        """The entry of a group, before anything changes its rewards."""
        # Of a group with unscored episodes a part trains: its samples keep their numbers.
        numbers = group.samples or range(len(group.episodes))
        entries = zip(numbers, map(SampleEntry.of, group.episodes), strict=True)
        return cls(group.index, dict(entries), reason)


@dataclass(frozen=True)
class StepEntry:
    """One step: the groups of its batch in their order, those dropped since the step before, and numbers of it."""

    step: int
    groups: tuple[GroupEntry, ...]
    dropped: tuple[GroupEntry, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """The entry as a line of JSON, in which floats keep all their bits."""
        lists = {"groups": _lists(self.groups), "dropped": _lists(self.dropped)}
        return _sealed({"step": self.step, **lists, "numbers": dict(self.numbers)})

    def difference(self, entry: StepEntry) -> str | None:
        """The first thing in which another entry of this step differs, in words; None if they are alike."""
        if [group.index for group in self.groups] != [group.index for group in entry.groups]:
            return f"it trained on the prompts {_indices(self)}, and now on {_indices(entry)}"
        for group, second_group in zip(self.groups, entry.groups, strict=True):
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
        for name, value in self.numbers.items():
            if value != entry.numbers.get(name):
                return f"{name} was {value!r}, and is {entry.numbers.get(name)!r} for the same rollouts"
        return None


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


def header(recipe: str, by_hand: Sequence[str]) -> str:
    """The first line of a schedule."""
    return _sealed({"step": 0, "format": FORMAT, "recipe": recipe, "by_hand": list(by_hand)})


def published_line(version: int, identity: str) -> str:
    """The line of a version that generators get."""
    return _sealed({"step": version, "published": identity})


def read_schedule(folder: Path) -> Schedule:
    """Read and check the schedule of a run.

    Raises:
        FileNotFoundError: it has none.
        BadSchedule: it is damaged, or says what cannot be: names line and step.
    """
    path = folder / SCHEDULE
    head: dict[str, Any] = {}
    steps: dict[int, StepEntry] = {}
    published: dict[int, str] = {}
    trained_at: dict[int, int] = {}
    samples: dict[int, dict[int, SampleEntry]] = {}
    # In the order of the file, which is that of the run: a version must be there before a token of it.
    for location, line in _lines(path):
        number = line["step"]
        if "format" in line:
            head = line
            if line["format"] != FORMAT:
                raise BadSchedule(f"{path}: format {line['format']}, and this version of forge reads {FORMAT}")
        elif "published" in line:
            published[number] = line["published"]
        else:
            entry = _step(location, line)
            if number != len(steps) + 1:
                raise BadSchedule(f"{location}: step {number} comes after step {len(steps)}")
            for group in entry.groups:
                if (earlier := trained_at.setdefault(group.index, number)) != number:
                    raise BadSchedule(f"{location}: prompt {group.index} trained in step {earlier} already")
            for group in (*entry.groups, *entry.dropped):
                _check_versions(location, number, group, published)
                samples.setdefault(group.index, {}).update(group.samples)
            steps[number] = entry
    if not head or not steps:
        raise BadSchedule(f"{path} has no step")
    # A replay draws all samples of a prompt in one request, those that were dropped included.
    groups = {index: GroupEntry(index, entries) for index, entries in samples.items()}
    return Schedule(head["recipe"], tuple(head["by_hand"]), steps, published, groups)


def _check_versions(location: str, step: int, group: GroupEntry, published: Mapping[int, str]) -> None:
    for number, sample in group.samples.items():
        # An episode without a turn of the policy has no tokens.
        if sample.spans and not are_spans(sample.spans):
            raise BadSchedule(f"{location}: sample {number} of prompt {group.index} has the spans {sample.spans}")
        for version, _ in sample.spans:
            if version not in published or version >= step:
                raise BadSchedule(
                    f"{location}: sample {number} of prompt {group.index} has tokens of version {version}, which no "
                    "generator had by then"
                )


def _sealed(line: dict[str, Any]) -> str:
    """A line of JSON with a checksum of itself: the order of a batch, say, may change no bit, and is checked too."""
    text = json.dumps(line, separators=(",", ":"))
    return f'{text[:-1]},"checksum":"{_checksum(text)}"}}'


def _checksum(text: str) -> str:
    return xxh3_64_hexdigest(text.encode())


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a schedule, each with its place in words."""
    for number, text in enumerate(path.read_text().splitlines(), 1):
        location = f"{path}, line {number}"
        try:
            line = json.loads(text)
            location = f"{location} (step {line['step']})"
            checksum = line.pop("checksum")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadSchedule(f"{location} is damaged: {text:.60}") from None
        # Of its contents: another program may have written the same line with other spaces.
        if checksum != _checksum(json.dumps(line, separators=(",", ":"))):
            raise BadSchedule(f"{location} is not what the run wrote: its checksum differs")
        yield location, line


def _step(location: str, line: dict[str, Any]) -> StepEntry:
    try:
        return StepEntry(line["step"], _groups(line["groups"]), _groups(line["dropped"]), line["numbers"])
    except (KeyError, TypeError, ValueError):
        raise BadSchedule(f"{location}: not the entry of a step") from None


def _lists(groups: Sequence[GroupEntry]) -> list[Any]:
    return [
        [group.index, group.reason, [[number, s.spans, s.reward, s.digest] for number, s in group.samples.items()]]
        for group in groups
    ]


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
