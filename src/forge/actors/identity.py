"""The origin of tokens: each is traced to weights that the trainer published, or the batch is rejected."""

from ..runtime.store import MissingVersion, Store, VersionStore
from ..types import Batch, Origin
from .staleness import StaleWeights

# The key under which the policy's weights are published; of several policies, the run's own.
POLICY = "policy"
# Versions back from a checkpoint whose identities go with it.
RECENT = 256


class UnknownWeights(RuntimeError):
    """Tokens of weights that are not those which were published under their version."""


class Identities:
    """The identities of the versions that the trainer published.

    Args:
        store: where it published them.
        key: under which.
    """

    def __init__(self, store: Store, key: str = POLICY) -> None:
        self._store = store
        self._key = key
        self._published: dict[int, set[str]] = {}

    def check(self, batch: Batch) -> None:
        """UnknownWeights unless the weights behind every token are those that were published under its version.

        Tokens without a version (-1) cannot be checked, and pass. Those with a version that was published must say with
        which weights; those with one that was not pass only as long as they say nothing about it (a generator that was
        never given a published version).
        """
        for origin in batch.origins:
            if origin.version < 0 or origin.identity in self._published.get(origin.version, ()):
                continue
            self._published = self._store.identities(self._key)
            identities = self._published.get(origin.version, set())
            if origin.identity not in identities and (origin.identity or identities):
                raise UnknownWeights(self._explain_unknown(origin))

    def recent(self, version: int, max_policy_age: int | None) -> dict[int, set[str]]:
        """Return the versions that tokens which have yet to train may state, for a checkpoint at `version`."""
        published = self._store.identities(self._key)
        oldest = version - max(RECENT, max_policy_age or 0)
        return {number: digests for number, digests in published.items() if number >= oldest}

    def adopt(self, published: dict[int, set[str]]) -> None:
        """Add identities that were published before this run was resumed."""
        self._store.adopt(self._key, published)

    def _explain_unknown(self, origin: Origin) -> str:
        claim = f"{origin.sampled_by or 'a generator'} says that it sampled with version {origin.version}"
        if not origin.identity:
            return f"{claim}, but not with which weights"
        if origin.version not in self._published:
            return f"{claim}, which was never published (there are {sorted(self._published) or 'none'})"
        same_weights = [version for version, digests in self._published.items() if origin.identity in digests]
        if not same_weights:
            return f"{claim}, but its weights (checksum {origin.identity}) were never published"
        tensor = describe_difference(self._store, origin.version, same_weights[-1], self._key)
        return f"{claim}, but its weights equal version {same_weights[-1]}{tensor}"


def check_current(store: VersionStore, version: int, who: str, key: str = POLICY) -> None:
    """StaleWeights if two versions were published after the one that `who` serves: it has missed an update."""
    newer = [published for published in store.published(key) if published > version]
    if len(newer) > 1:
        raise StaleWeights(
            f"{who} still serves version {version}, though {newer} were published since: it missed an update"
            f"{describe_difference(store, newer[-1], version, key)}"
        )


def describe_difference(store: Store, version: int, second_version: int, key: str = POLICY) -> str:
    """Return the tensor in which two versions differ, as the end of a sentence; empty if one of them is no longer
    stored."""
    try:
        tensor = store.manifest(key, version).first_difference(store.manifest(key, second_version))
    except MissingVersion:
        return ""
    return "" if tensor is None else f" (they differ in {tensor!r})"
