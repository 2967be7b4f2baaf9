"""Errors of weight stores."""


class MissingVersion(KeyError):
    """The store does not have this key or version."""

    def __str__(self) -> str:
        return str(self.args[0])


class IncompleteVersion(RuntimeError):
    """A rank did not write its part, or a tensor is incomplete; the version was not published."""


class VersionConflict(RuntimeError):
    """The version was published before with other values: a published version never changes."""


class CorruptWeights(RuntimeError):
    """Values differ from those that were published."""
