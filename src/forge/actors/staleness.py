"""Staleness: how old a token may be when it trains; one rule for admission of rollouts, buffer and trainer."""

from dataclasses import dataclass

from ..types import Batch, Episode, Group


class StaleWeights(RuntimeError):
    """Error: tokens were sampled with weights older than allowed, or by a replica that missed an update."""


@dataclass(frozen=True)
class Staleness:
    """The rule that a token may be at most `max_policy_age` versions older than the weights that it trains.

    At 0 sampling and training take turns (lock-step). A token of version -1, whose sampler is unknown, has no age: it
    passes, and the trainer treats it as on-policy.

    Args:
        max_policy_age: maximum age in versions; None is any age.

    Raises:
        ValueError: the age is negative.
    """

    max_policy_age: int | None = None

    def __post_init__(self) -> None:
        if self.max_policy_age is not None and self.max_policy_age < 0:
            raise ValueError(f"max_policy_age must be None or at least 0, got {self.max_policy_age}")

    def admitted_steps(self, served: int) -> float:
        """Return the number of training steps, from the start of the run, whose rollouts may start while version
        `served` is served.

        >>> Staleness(max_policy_age=1).admitted_steps(served=3)
        5
        """
        return float("inf") if self.max_policy_age is None else served + self.max_policy_age + 1

    def fresh(self, item: Episode | Group, version: int) -> bool:
        """Return whether the oldest token of an item is fresh enough to train weight version `version`.

        An item of another class is judged by its `policy_version`, and may train if it has none.
        """
        if self.max_policy_age is None:
            return True
        oldest = item.version if hasattr(item, "version") else getattr(item, "policy_version", None)
        return oldest in (None, -1) or oldest >= version - self.max_policy_age

    def check(self, batch: Batch, version: int) -> None:
        """Check that all trained tokens of a batch are fresh enough, by their recorded versions, to train weight
        version `version`.

        Raises:
            StaleWeights: a token is older than allowed, or of a later version than `version`; names who sampled it.
        """
        if self.max_policy_age is None:
            return

        versions = batch.versions[batch.mask]
        known_versions = versions[versions >= 0]
        if not len(known_versions):
            return

        oldest = int(known_versions.min())
        newest = int(known_versions.max())

        for sampled_version, is_wrong, reason in (
            (oldest, oldest < version - self.max_policy_age, f"max_policy_age is {self.max_policy_age}"),
            (newest, newest > version, "that is in the future"),
        ):
            if is_wrong:
                samplers = {origin.sampled_by for origin in batch.origins if origin.version == sampled_version}
                raise StaleWeights(
                    f"step {version} was given tokens sampled by weight version {sampled_version} "
                    f"({', '.join(sorted(samplers)) or 'unknown'}): {reason}"
                )
