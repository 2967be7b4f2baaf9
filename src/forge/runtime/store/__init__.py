"""State that survives a process: versioned weights, shared by the processes of a run, and journals.

The weight store as functions, `import forge.store as ts`, one store for all processes of a run, with the names and
arguments of TorchStore:

    await ts.put("policy", model.state_dict(), version=3)
    await ts.get("policy", model.state_dict(), version=3)     # into any layout

A controller's first use creates the store.
"""

from __future__ import annotations

from . import spmd as spmd
from .calls import (
    client,
    delete,
    delete_batch,
    exists,
    get,
    get_batch,
    get_state_dict,
    init_logging,
    initialize,
    keys,
    put,
    put_batch,
    put_state_dict,
    reset_client,
    shutdown,
    wait,
)
from .default import default_store, use
from .errors import CorruptWeights, IncompleteVersion, MissingVersion, VersionConflict
from .journal import Journal
from .protocol import Store
from .spmd import initialize as initialize_spmd
from .strategies import ControllerStorageVolumes, HostStrategy, LocalRankStrategy, TorchStoreStrategy, TransportType
from .transfer import Ranks
from .values import TensorSlice
from .versions import VersionStore

__all__ = [
    "ControllerStorageVolumes",
    "CorruptWeights",
    "HostStrategy",
    "IncompleteVersion",
    "Journal",
    "LocalRankStrategy",
    "MissingVersion",
    "Ranks",
    "Store",
    "TensorSlice",
    "TorchStoreStrategy",
    "TransportType",
    "VersionConflict",
    "VersionStore",
    "client",
    "default_store",
    "delete",
    "delete_batch",
    "exists",
    "get",
    "get_batch",
    "get_state_dict",
    "init_logging",
    "initialize",
    "initialize_spmd",
    "keys",
    "put",
    "put_batch",
    "put_state_dict",
    "reset_client",
    "shutdown",
    "use",
    "wait",
]
