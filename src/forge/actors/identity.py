"""Check the origin of tokens: a batch with tokens of weights that the trainer did not publish is rejected."""

from ..runtime.store import MissingVersion, Store, VersionStore
from ..types import Batch, Origin
from .staleness import StaleWeights

# The key of the policy's weights in the store, in a run with one policy.
POLICY = "policy"
# Number of versions before a checkpoint whose identities are saved with it.
RECENT = 256


class UnknownWeights(RuntimeError):
    """Error: tokens were sampled with other weights than those published under their version."""


class Identities:
    """The identities (digests of all weights) of the versions that a trainer published.

    Args:
        store: the store in which they are published.
        key: their key in the store.
    """

    def __init__(self, store: Store, key: str = POLICY) -> None:
        self._store, self._key = store, key
        self._published: dict[int, set[str]] = {}

    def check(self, batch: Batch) -> None:
        """Check that every token of a batch was sampled with the weights that were published under its version.

        Tokens without a version (-1) cannot be checked, and pass. Tokens of a version that was never published pass if
        they state no identity: their generator was never given a published version.

        Raises:
            UnknownWeights: the identity that a token states is not its version's, or a token of a published version
                states none.
        """
        for origin in batch.origins:
            if origin.version < 0 or origin.identity in self._published.get(origin.version, ()):
                continue

            self._published = self._store.identities(self._key)  # again: the version may be new
            identities = self._published.get(origin.version, set())
            # A token without an identity passes if its version has none either.
            if origin.identity not in identities and (origin.identity or identities):
                raise UnknownWeights(self._explain_unknown(origin))

    def recent(self, version: int, max_policy_age: int | None) -> dict[int, set[str]]:
        """Return the identities, by version, to save with a checkpoint at `version`.

        They are those that rollouts may state which train after a resume from it.

        Args:
            max_policy_age: how many versions old a token may be when it trains; None is any number.
        """
        published = self._store.identities(self._key)
        oldest = version - max(RECENT, max_policy_age or 0)
        return {number: digests for number, digests in published.items() if number >= oldest}

    def adopt(self, published: dict[int, set[str]]) -> None:
        """Add the identities, by version, of weights that were published before this run was resumed."""
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
    """Check that a generator serves the newest or the second newest published version.

    Args:
        version: the version that the generator serves.
        who: the generator, for the error.

    Raises:
        StaleWeights: two or more versions were published since.
    """
    newer = [published for published in store.published(key) if published > version]
    if len(newer) > 1:
        raise StaleWeights(
            f"{who} still serves version {version}, though {newer} were published since: it missed an update"
            f"{describe_difference(store, newer[-1], version, key)}"
        )


def describe_difference(store: Store, version: int, second_version: int, key: str = POLICY) -> str:
    """Return the last part of an error message that names a tensor in which two versions differ, e.g. " (they differ in
    'w')".

    Empty if they do not differ, or one of them is no longer known to the store.
    """
    try:
        tensor = store.manifest(key, version).first_difference(store.manifest(key, second_version))
    except MissingVersion:
        return ""
    return "" if tensor is None else f" (they differ in {tensor!r})"
