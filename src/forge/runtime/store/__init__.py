"""State that survives a process: versioned weights, shared by the processes of a run, and journals."""

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
