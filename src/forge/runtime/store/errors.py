"""Errors of weight stores."""


class MissingVersion(KeyError):
    """Error: a requested key or version is not in the store."""

    def __str__(self) -> str:
        return str(self.args[0])


class IncompleteVersion(RuntimeError):
    """Error: a rank did not write its part of a version, or a tensor is incomplete, so the version was not
    published."""


class VersionConflict(RuntimeError):
    """Error: an already published version is put again with other values, but a published version never changes."""


class CorruptWeights(RuntimeError):
    """Error: stored values differ from the published values."""
