"""State that survives a process: versions of weights, which the processes of a run share, and journals."""

from .errors import CorruptWeights, IncompleteVersion, MissingVersion, VersionConflict
from .journal import Journal
from .protocol import Store
from .versions import VersionStore

__all__ = [
    "CorruptWeights",
    "IncompleteVersion",
    "Journal",
    "MissingVersion",
    "Store",
    "VersionConflict",
    "VersionStore",
]
