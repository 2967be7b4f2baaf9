"""Errors of weight stores."""


class MissingVersion(KeyError):
    """A key or a version of it that was asked for is not in the store."""

    def __str__(self) -> str:
        return str(self.args[0])


class IncompleteVersion(RuntimeError):
    """A rank did not write its part of a version, or a tensor is incomplete; the version was not published."""


class VersionConflict(RuntimeError):
    """A version that was published before is put again with other values: a published version never changes."""


class CorruptWeights(RuntimeError):
    """Stored values differ from those that were published."""
