"""Private names of TorchStore and torchforge that their test files import beside public ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import forge.store as ts

from forge.system.boxes import local_boxes


def unavailable() -> bool:
    """Whether a transport of TorchStore's is installed."""
    return False


torchcomms_rdma_available = torchcomms_uniflow_available = monarch_rdma_transport_available = unavailable


class SharedMemoryCache:
    """TorchStore's cache of segments, which a client there has under this class."""


@dataclass
class Request:
    """What a client of TorchStore asks of a volume."""

    tensor_slice: ts.TensorSlice

    @classmethod
    def from_any(cls, key: str, shards: Any) -> Request:
        """The block of a tensor that this rank has."""
        ((box, _),) = local_boxes(shards)
        return cls(ts.TensorSlice(box.offset, global_shape=tuple(shards.shape), local_shape=box.size))


class PrivateOfServices:
    """A class of torchforge's services that their callers never see."""


LeastLoadedRouter = Replica = ReplicaState = RoundRobinRouter = ServiceConfig = SessionRouter = PrivateOfServices
ProcessConfig = PrivateOfServices


class PrivateTimer:
    """A timer of torchforge's tracers."""


_TimerCPU = _TimerCUDA = PrivateTimer
