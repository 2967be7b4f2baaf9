"""The account of every sampled token: it was trained once, or there is a named reason why not.

sampled = trained + orphan + auxiliary + constrained + surplus + unscored
"""

from __future__ import annotations

from collections import Counter

# Why the tokens of a turn are not trained. The last is known only once the episode has ended.
EXCLUSIONS = ("orphan", "auxiliary", "constrained", "surplus", "unscored")


class Certificate(Counter[str]):
    """Counts of tokens: `sampled`, `trained`, and one for each of `EXCLUSIONS`."""

    def check(self) -> None:
        """Raise AssertionError if the counts do not add up: tokens were lost or doubled."""
        excluded = sum(self[name] for name in EXCLUSIONS)
        if self["sampled"] != self["trained"] + excluded:
            parts = ", ".join(f"{name} {self[name]}" for name in ("trained", *EXCLUSIONS))
            raise AssertionError(f"{self['sampled']} sampled tokens are not {parts}: some were lost or counted twice")

    def without_training(self, reason: str) -> Certificate:
        """The account of an episode that is not trained after all."""
        moved = Certificate(self)
        moved[reason] += moved.pop("trained", 0)
        return moved
