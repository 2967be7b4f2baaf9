"""The schedule of a run in `schedule.jsonl`: what its steps trained on, and which weights drew which token.

With the run's configuration it determines every bit that the run computed: `forge replay` computes them again.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress, groupby
from typing import Any

from xxhash import xxh3_64_hexdigest

from ..types import Episode, Group, Spans

SCHEDULE = "schedule.jsonl"
FORMAT = 1
NUMBERS = ("train/loss", "train/grad_norm", "critic/loss")  # of a step, as the trainer returned them


@dataclass(frozen=True)
class SampleEntry:
    """One episode of a group: who drew its tokens, its reward, and a digest of tokens and log-probabilities."""

    spans: Spans
    reward: float | None
    digest: str

    @classmethod
    def from_episode(cls, episode: Episode) -> SampleEntry:
        """Return the entry of an episode, its branches included."""
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
    def from_group(cls, group: Group, reason: str = "") -> GroupEntry:
        """Return the entry of a group, before anything changes its rewards."""
        # Of a group with unscored episodes a part trains: its samples keep their numbers.
        numbers = group.samples or range(len(group.episodes))
        entries = zip(numbers, map(SampleEntry.from_episode, group.episodes), strict=True)
        return cls(group.index, dict(entries), reason)


@dataclass(frozen=True)
class StepEntry:
    """One step: the groups of its batch in their order, those dropped since the step before, and numbers of it."""

    step: int
    groups: tuple[GroupEntry, ...]
    dropped: tuple[GroupEntry, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return the entry as a line of JSON, in which floats keep all their bits."""
        lists = {"groups": _by_column(self.groups), "dropped": _by_column(self.dropped)}
        return seal_line({"step": self.step, **lists, "numbers": dict(self.numbers)})


def header_line(recipe: str, by_hand: Sequence[str]) -> str:
    """Return the first line of a schedule."""
    return seal_line({"step": 0, "format": FORMAT, "recipe": recipe, "by_hand": list(by_hand)})


def published_line(version: int, identity: str) -> str:
    """Return the line of a version that generators get."""
    return seal_line({"step": version, "published": identity})


def seal_line(line: dict[str, Any]) -> str:
    """Return a line of JSON with a checksum of itself: the order of a batch, say, may change no bit, and is checked
    too."""
    text = json.dumps(line, separators=(",", ":"))
    return f'{text[:-1]},"checksum":"{checksum_of(text)}"}}'


def checksum_of(text: str) -> str:
    """Return the checksum that :func:`seal_line` writes, as hexadecimal digits."""
    return xxh3_64_hexdigest(text.encode())


def _by_column(groups: Sequence[GroupEntry]) -> list[Any]:
    return [
        [group.index, group.reason, [[number, s.spans, s.reward, s.digest] for number, s in group.samples.items()]]
        for group in groups
    ]
