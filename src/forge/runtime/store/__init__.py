"""State that survives a process: versioned weights, shared by the processes of a run, and journals.

The weight store as functions, one store for all processes of a run, is in `calls`; a controller's first use creates it.
"""

from __future__ import annotations

from .calls import delete, exists, get, keys, put, wait
from .default import default_store, release, use
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
    "default_store",
    "delete",
    "exists",
    "get",
    "keys",
    "put",
    "release",
    "use",
    "wait",
]
