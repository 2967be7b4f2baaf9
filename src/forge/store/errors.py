"""What can go wrong between those who publish weights and those who use them."""

from __future__ import annotations


class MissingVersion(KeyError):
    """The store does not hold what was asked for."""

    def __str__(self) -> str:
        return str(self.args[0])


class IncompleteVersion(RuntimeError):
    """A version that not every rank has written, or whose blocks do not fill every tensor; nobody sees it."""


class VersionConflict(RuntimeError):
    """A version that was published before with other values: a published version never changes."""


class CorruptWeights(RuntimeError):
    """Values that are not those which were published."""
