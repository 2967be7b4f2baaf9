"""How a component is placed and supervised: processes, replicas, hosts, devices, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Options:
    """Placement and supervision of one component.

    Args:
        procs: processes of one replica; they form one torch.distributed group.
        num_replicas: independent copies that calls are balanced over.
        hosts: hosts of its own for each replica, its processes divided over them; replicas of one process are spread
            over this many hosts instead. None is the controller's own host.
        with_gpus: give each process one GPU of its own.
        mesh_name: what the component is called in errors, metrics and status; None makes it from the class.
        share: name of processes that several components live in together; None means own processes.
        share_procs: how many processes have that name. A component of as many has a rank in each of them; replicas of
            one process live in one each, in turn. With GPUs there is one for each of them.
        per_process: replicas that live together in one process.
        threads: compute threads of each process.
        env: further environment variables of the processes.
        memory_gb: limit on each process's private memory (RLIMIT_DATA), in GB; beyond it, allocating fails there.
        router: how a replica is chosen for a routed call, see `forge.controller.routers`: a name, or a function.
        call_timeout: seconds after which a call without an answer is an error.
        setup_timeout: the same for the component's start.
        ping_timeout: seconds within which a replica that answers no ping is found to be hung, and is replaced.
        stall_after: seconds without an answer to any call after which it is printed who waits for whom.
        max_in_flight: most calls at one replica at a time; further callers wait their turn.
        max_restarts: replacements in a row that fail, or die within ten seconds, before a replica is given up.
        retries: how often a call is sent again because its replica was lost.
        quarantine_after: replicas that one call may take down before it is an error.
    """

    procs: int = 1
    num_replicas: int = 1
    hosts: int | None = None
    with_gpus: bool = False
    mesh_name: str | None = None
    share: str | None = None
    share_procs: int = 1
    per_process: int = 1
    threads: int = 1
    env: dict[str, str] = field(default_factory=dict)
    memory_gb: float | None = None
    router: Any = "least_loaded"
    call_timeout: float = 1800.0
    setup_timeout: float = 300.0
    ping_timeout: float = 4.0
    stall_after: float = 60.0
    max_in_flight: int = 1024
    max_restarts: int = 5
    retries: int = 4
    quarantine_after: int = 2

    def __post_init__(self) -> None:
        self.check()

    @property
    def heavy(self) -> bool:
        """Whether it holds what only the end of a process gives back."""
        return self.procs > 1 or self.with_gpus

    def check(self) -> None:
        """Raises ValueError for a setting that cannot be."""
        for name in (
            *("procs", "num_replicas", "hosts", "share_procs", "per_process", "threads", "max_in_flight"),
            "quarantine_after",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("call_timeout", "setup_timeout", "ping_timeout", "stall_after", "memory_gb"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_restarts", "retries"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.share is None and self.share_procs != 1:
            raise ValueError(f"share_procs = {self.share_procs} does nothing: share is not set")
        if self.share is not None and (self.procs not in (1, self.share_procs) or self.hosts or self.per_process != 1):
            raise ValueError(
                f"a component that shares the process {self.share!r} has one process, or all {self.share_procs} of "
                "that name (share_procs), and no host of its own; set share to null to give it its own"
            )
        if self.per_process > 1 and (self.procs > 1 or self.with_gpus):
            raise ValueError("per_process is for light replicas: it needs procs 1 and no GPUs")
        if self.hosts is not None and self.procs == 1 and -(-self.num_replicas // self.per_process) < self.hosts:
            raise ValueError(
                f"hosts = {self.hosts} is more than num_replicas = {self.num_replicas} can fill: lower hosts, "
                "raise num_replicas, or raise procs to spread one replica"
            )
        if self.hosts is not None and self.procs > 1 and self.procs % self.hosts:
            raise ValueError(f"procs = {self.procs} cannot be divided evenly over hosts = {self.hosts}")
