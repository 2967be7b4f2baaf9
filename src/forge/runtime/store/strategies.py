"""TorchStore's strategies, which say where its storage volumes are.

Here a value is in the memory of the host where it was put, and readers on that host map it: there are no volumes to
place, and each strategy is accepted. So is each transport: which one is used follows from where reader and writer are.
"""

from __future__ import annotations

from enum import Enum, auto


class TransportType(Enum):
    """TorchStore's ways to move values. None is chosen: one host shares memory, hosts use RDMA where they have it."""

    Unset = auto()
    MonarchRPC = auto()
    MonarchRDMA = auto()
    TorchComms = auto()
    TorchCommsRDMA = TorchComms
    Gloo = auto()
    SharedMemory = auto()


class TorchStoreStrategy:
    """Base of the strategies.

    Args:
        default_transport_type: accepted and not used.

    Raises:
        TypeError: it is not a `TransportType`.
    """

    def __init__(self, default_transport_type: TransportType = TransportType.Unset) -> None:
        if not isinstance(default_transport_type, TransportType):
            raise TypeError(f"default_transport_type must be a TransportType, got {default_transport_type!r}")


class LocalRankStrategy(TorchStoreStrategy):
    """A volume for each rank."""


class HostStrategy(TorchStoreStrategy):
    """A volume for each host."""


class ControllerStorageVolumes(TorchStoreStrategy):
    """One volume, in the controller."""
