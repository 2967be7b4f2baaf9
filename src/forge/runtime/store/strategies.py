"""TorchStore's strategies, which say where its storage volumes are.

Here a value is in the memory of the host where it was put, and readers on that host map it: there are no volumes to
place, and each strategy is accepted.
"""

from __future__ import annotations


class TorchStoreStrategy:
    """Base of the strategies.

    Raises:
        ValueError: a transport was chosen; it follows from where reader and writer are.
    """

    def __init__(self, default_transport_type: object = None) -> None:
        if default_transport_type is not None:
            raise ValueError(
                f"default_transport_type {default_transport_type} does nothing: processes of one host share memory, "
                "and hosts transfer by RDMA where they have it; omit it"
            )


class LocalRankStrategy(TorchStoreStrategy):
    """A volume for each rank."""


class HostStrategy(TorchStoreStrategy):
    """A volume for each host."""


class ControllerStorageVolumes(TorchStoreStrategy):
    """One volume, in the controller."""
