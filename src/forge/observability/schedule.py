"""The schedule of a run in `schedule.jsonl`: what its steps trained on, and which weights drew which token.

With the run's configuration it determines every bit that the run computed: `forge replay` computes them again.
"""

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
NUMBERS = ("train/loss", "train/grad_norm", "critic/loss")  # the metrics of a step that a replay must reproduce


@dataclass(frozen=True)
class SampleEntry:
    """Schedule entry of one episode of a group.

    spans: (version, tokens) of each stretch of sampled tokens, the weights and the number of tokens that they drew.
    reward: None if it is unscored.
    digest: of its tokens and log-probabilities.
    """

    spans: Spans
    reward: float | None
    digest: str

    @classmethod
    def from_episode(cls, episode: Episode) -> "SampleEntry":
        """Return the entry of an episode with all its branches."""
        digest = blake2b(digest_size=8)
        versions: list[int] = []
        for branch in (*episode.branches, episode):
            # array instead of numpy, which takes twice as long for some ten tokens.
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
    """Schedule entry of the episodes of one prompt.

    index: of the prompt.
    samples: the episodes, by their numbers.
    reason: why they were dropped; "" if they trained.
    """

    index: int
    samples: Mapping[int, SampleEntry]
    reason: str = ""

    @classmethod
    def from_group(cls, group: Group, reason: str = "") -> "GroupEntry":
        """Return the entry of a group; to be called before penalties change its rewards."""
        # Unscored episodes were removed from the group; `group.samples` has the numbers of the remaining ones.
        numbers = group.samples or range(len(group.episodes))
        entries = zip(numbers, map(SampleEntry.from_episode, group.episodes), strict=True)
        return cls(group.index, dict(entries), reason)


@dataclass(frozen=True)
class StepEntry:
    """Schedule entry of one step: the groups of its batch in order, the groups dropped since the last step, and metrics
    of NUMBERS."""

    step: int
    groups: tuple[GroupEntry, ...]
    dropped: tuple[GroupEntry, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return the entry as a line of JSON with a checksum, in which floats keep all their bits."""
        lists = {"groups": _by_column(self.groups), "dropped": _by_column(self.dropped)}
        return seal_line({"step": self.step, **lists, "numbers": dict(self.numbers)})


def header_line(recipe: str, by_hand: Sequence[str]) -> str:
    """Return the first line of a schedule, with the name of the training loop and the objects passed from Python."""
    return seal_line({"step": 0, "format": FORMAT, "recipe": recipe, "by_hand": list(by_hand)})


def published_line(version: int, identity: str) -> str:
    """Return the line for the publication of weights to the generators.

    Args:
        version: of the weights.
        identity: their digest.
    """
    return seal_line({"step": version, "published": identity})


def seal_line(line: dict[str, Any]) -> str:
    """Return an object as a line of JSON whose last key is a checksum of the rest.

    >>> seal_line({"step": 1})
    '{"step":1,"checksum":"70fe9426c227d3b5"}'
    """
    text = json.dumps(line, separators=(",", ":"))
    return f'{text[:-1]},"checksum":"{checksum_of(text)}"}}'


def checksum_of(text: str) -> str:
    """Return the checksum of a line's text, as 16 hexadecimal digits."""
    return xxh3_64_hexdigest(text.encode())


def _by_column(groups: Sequence[GroupEntry]) -> list[Any]:
    return [
        [group.index, group.reason, [[number, s.spans, s.reward, s.digest] for number, s in group.samples.items()]]
        for group in groups
    ]
