"""Staleness: the one rule, for admission, buffer and trainer, on how old a token may be when it trains."""

from dataclasses import dataclass

from ..types import Batch, Episode, Group


class StaleWeights(RuntimeError):
    """Tokens of weights that are older than allowed, or of a replica that missed an update."""


@dataclass(frozen=True)
class Staleness:
    """At most `max_policy_age` versions lie between the weights that sampled a token and those it trains; None: any.

    At 0 sampling and training take turns (lock-step). Version -1 means that the sampler is unknown: its age cannot be
    judged, and the trainer takes it as on-policy.

    Raises:
        ValueError: a negative age.
    """

    max_policy_age: int | None = None

    def __post_init__(self) -> None:
        if self.max_policy_age is not None and self.max_policy_age < 0:
            raise ValueError(f"max_policy_age must be None or at least 0, got {self.max_policy_age}")

    def admitted_steps(self, served: int) -> float:
        """Rollouts for steps below this may start while the generators serve version `served`."""
        return float("inf") if self.max_policy_age is None else served + self.max_policy_age + 1

    def fresh(self, item: Episode | Group, version: int) -> bool:
        """Return whether an item may train weights `version`, by its oldest token, or by the `policy_version` that an
        item of another class states."""
        if self.max_policy_age is None:
            return True
        oldest = item.version if hasattr(item, "version") else getattr(item, "policy_version", None)
        return oldest in (None, -1) or oldest >= version - self.max_policy_age

    def check(self, batch: Batch, version: int) -> None:
        """Check every trained token of a batch by the version that the token itself states.

        Raises:
            StaleWeights: a token is older than allowed, or of a version after `version`; names who sampled it.
        """
        if self.max_policy_age is None:
            return
        versions = batch.versions[batch.mask]
        known_versions = versions[versions >= 0]
        if not len(known_versions):
            return
        oldest = int(known_versions.min())
        newest = int(known_versions.max())

        for extreme, is_wrong, reason in (
            (oldest, oldest < version - self.max_policy_age, f"max_policy_age is {self.max_policy_age}"),
            (newest, newest > version, "that is in the future"),
        ):
            if is_wrong:
                samplers = sorted({origin.sampled_by for origin in batch.origins if origin.version == extreme})
                raise StaleWeights(
                    f"step {version} was given tokens that version {extreme} sampled "
                    f"({', '.join(samplers) or 'unknown'}): {reason}"
                )
