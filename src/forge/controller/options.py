"""How a component is placed: processes, replicas, devices, limits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Options:
    """Placement of one component.

    Args:
        procs: processes of one replica; they form one torch.distributed group.
        num_replicas: independent copies that calls are balanced over.
        with_gpus: give each process one GPU of its own.
        share: name of a process that several light components live in together; None means own processes.
        threads: compute threads of each process.
        env: further environment variables of the processes.
        call_timeout: seconds after which a call without an answer is an error.
        setup_timeout: the same for the component's start.
    """

    procs: int = 1
    num_replicas: int = 1
    with_gpus: bool = False
    share: str | None = None
    threads: int = 1
    env: dict[str, str] = field(default_factory=dict)
    call_timeout: float = 1800.0
    setup_timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in ("procs", "num_replicas", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("call_timeout", "setup_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive (seconds), got {getattr(self, name)}")
        if self.share is not None and (self.procs, self.num_replicas, self.with_gpus) != (1, 1, False):
            raise ValueError(
                f"a component that shares the process {self.share!r} has one process, one replica and no GPU; "
                "set share to null to give it its own"
            )
