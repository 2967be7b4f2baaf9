"""What outlives a process: versioned weights between the processes of a run, and journals of what was done.

`import forge.store as ts` gives the functions of the weight store: `ts.put`, `ts.get`, `ts.wait`, ...
"""

from .api import default_store, delete, exists, get, keys, put, use, wait
from .errors import CorruptWeights, IncompleteVersion, MissingVersion, VersionConflict
from .journal import Journal
from .parts import Ranks
from .protocol import Store
from .versions import VersionStore

__all__ = [
    "CorruptWeights",
    "IncompleteVersion",
    "Journal",
    "MissingVersion",
    "Ranks",
    "Store",
    "VersionConflict",
    "VersionStore",
    "default_store",
    "delete",
    "exists",
    "get",
    "keys",
    "put",
    "use",
    "wait",
]
