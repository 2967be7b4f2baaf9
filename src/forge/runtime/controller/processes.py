"""The processes of a replica: how they are started, and watched until they end."""

import asyncio
import ctypes
import functools
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...observability.console import configure_logging, log_failure
from ...observability.metrics import PROCESS_NAME
from ...system.devices import GRANTED
from ...system.files import cache_folder
from ..forking.forkserver import ForkServer
from ..inventory import VISIBLE
from ..names import HOST
from ..process import Process, machine_id
from ._monarch import BootstrapCommand, HostMesh, ProcMesh
from .actor_host import ActorHost
from .hosts import Hosts
from .options import Options
from .patience import wait_for

log = logging.getLogger(__name__)

PROGRAM = "forge.runtime.controller.child"
STOP_PATIENCE = 8.0  # seconds of a `Patience` within which a process mesh may stop by itself
# By default glibc gives the memory of large tensors back at every step, for the kernel to zero it again: up to a tenth
# of a training step. With these, up to 512 MB stay with the process, and tensors above 64 MB are still given back.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
}
# The compiled code of torch.compile, up to 40 s of work for FlexAttention. By default it is in TMPDIR, which ends with
# a run.
COMPILERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class ProcessGroup:
    """The processes of one replica, or the processes that several replicas share.

    Args:
        name: of the group, in log lines.
        mesh: the running processes.
        options: of the component that they were started for; others that share them must have equal ones.
        hosts: where the processes run.
        shared: whether other replicas may join.

    Attributes:
        members: the replicas in these processes (`Replica`); when a process is lost, all of them are.
        starting: number of replicas that are being built. Importing large libraries can hold the interpreter for
            seconds, so that silence does not indicate a hang meanwhile.
        dead: why the processes are lost or stopped; None while they live.
    """

    def __init__(self, name: str, mesh: ProcMesh, options: Options, hosts: Hosts, *, shared: bool = False) -> None:
        self.name, self.mesh, self.options = name, mesh, options
        self.hosts, self.shared = hosts, shared

        # An actor mesh with one `ActorHost` in each process.
        self.actor_host: Any = mesh.spawn(name, ActorHost, name if hosts.borrowed else None)
        self.members: list[Any] = []
        self.starting = 0
        self.dead: str | None = None
        self.stopped_by_signal = False
        self.processes: list[Process] = []
        self._known: set[tuple[int, str]] = set()

        self._pinging: asyncio.Task | None = None
        hosts.when_lost(self.fail)

    @property
    def pids(self) -> list[int]:
        """Return the process ids, one per rank."""
        return [process.pid for process in self.processes]

    @property
    def procs(self) -> int:
        """Return the number of processes."""
        return self.options.share_procs if self.options.share is not None else self.options.procs

    def check_options(self, component: str, options: Options) -> None:
        """Check that another component that will share these processes has the options with which they were started.

        Raises:
            ValueError: an option that concerns whole processes differs; names it.
        """
        for name in ("share_procs", "with_gpus", "gpus_per_proc", "threads", "env", "memory_gb", "ping_timeout"):
            started_with = getattr(self.options, name)
            requested = getattr(options, name)
            if started_with != requested:
                raise ValueError(
                    f"{component} shares the process {self.name!r}, which was started with {name} = {started_with!r}, "
                    f"but it is configured with {requested!r}: use equal options for components with one share"
                )

    def watch(self, processes: Iterable[tuple[int, str]]) -> None:
        """Fail these processes, given as (process id, host), once one of them ends or they stop answering.

        `host` is what `ActorHost.ping` returns. Processes that are watched already may be among them.
        """
        for pid, host in {*processes} - self._known:
            # The id of a machine starts with its host name.
            location = "" if host == machine_id() else f" on {host.partition(' ')[0]}"
            on_end = functools.partial(self.fail, f"process {pid}{location} ended")
            self.processes.append(self.hosts.process(pid, host, on_end))
            self._known.add((pid, host))

        if self._pinging is None:
            self._pinging = asyncio.get_running_loop().create_task(self._watch_pings())
            self._pinging.add_done_callback(log_failure)

    def fail(self, reason: str) -> None:
        """Mark the processes as lost, kill them, and fail every replica in them; later calls have no effect."""
        if self.dead is not None:
            return

        self.dead = reason
        self.stopped_by_signal = any(process.stopped for process in self.processes)
        if self.stopped_by_signal:
            self.dead += ": it was stopped by a signal"
        for process in self.processes:
            process.kill()

        # A user's processes are not killed: hung or dead, nothing may be started in them again.
        if self.hosts.borrowed:
            self.hosts.give_up()
        for member in list(self.members):
            member.fail(self.dead)

    async def stop(self) -> None:
        """Stop the processes, by force if they do not react; cancelling this coroutine kills them at once.

        In a user's processes only forge's actor is stopped.
        """
        if self._pinging is not None:
            self._pinging.cancel()
        was_alive = self.dead is None
        self.dead = self.dead or "it was shut down"

        try:
            stopping = self.actor_host.stop() if self.hosts.borrowed else self.mesh.stop()
            # Lost processes have been killed: Monarch would wait half a minute for those of a lost host.
            waited = (self.processes, STOP_PATIENCE) if was_alive else ((), 1.0)
            await wait_for(stopping.as_asyncio(), *waited)
        except Exception as error:
            # Expected of a mesh with a dead process. Either way its processes are killed below.
            if was_alive:
                log.warning("%s: could not be stopped cleanly and is killed (%s)", self.name, type(error).__name__)
        finally:
            for process in self.processes:
                process.kill()
                process.close()

    async def _watch_pings(self) -> None:
        """Ping the members periodically, and fail the processes once they hang.

        They hang if neither a ping nor any call is answered within `ping_timeout`, a `Patience`. Calls count as well,
        because a ping may have to wait behind thousands of them. After an answer no ping is needed for a quarter of
        that time; processes that no call waits for have four times as long, as each message takes a millisecond.
        """
        sent = 0.0
        while self.dead is None:
            await asyncio.sleep(self.options.ping_timeout / 4)
            max_silence = self.options.ping_timeout / (4 if any(member.requests for member in self.members) else 1)
            last_answer = min((max(sent, member.last_answer) for member in self.members), default=0.0)
            if self.starting or not self.members or time.monotonic() - last_answer < max_silence:
                continue

            # A replica with a rank in every process answers for all of them; light replicas only for one each.
            spanning = [member for member in self.members if member.options.procs == self.procs]
            pinged = spanning[:1] or list(self.members)
            sent = time.monotonic()

            # The defaults keep the values of this round.
            def is_answered(pinged: list[Any] = pinged, sent: float = sent) -> bool:
                return bool(self.starting) or all(member.last_answer > sent for member in pinged)

            pings = asyncio.gather(*(member.ping() for member in pinged))
            try:
                # CPU time of a user's processes does not count: while one of the user's actors is being made, which may
                # use much of it, no other actor is served.
                await wait_for(
                    pings, self.processes, self.options.ping_timeout, is_answered, idle_only=self.hosts.borrowed
                )
            except TimeoutError:
                self.fail(f"the process answered neither a ping nor a call for {time.monotonic() - sent:.3g} s")


def spawn_processes(
    mesh: HostMesh,
    name: str,
    procs: int,
    options: Options,
    hosts: Hosts,
    gpus: dict[str, list[str]],
    server: ForkServer | None = None,
) -> ProcMesh:
    """Start `procs` processes on each host of a host mesh, and return them as a process mesh.

    Args:
        name: of the processes, in log lines, traces and `top`.
        gpus: the devices that the processes may see, by the address of their host.
        server: the fork server that the processes are forked from; None starts them as new programs.
    """
    settings = {**library_environment(options.threads), PROCESS_NAME: name}

    # Over the loopback no other machine can be reached: let NCCL and gloo choose, unless the user chose an interface.
    if hosts.spans_machines:
        for variable in INTERFACES - os.environ.keys():
            del settings[variable]

    # In the environment from the start: the allocator reads its variables before the process runs any code.
    variables = hosts.variables()
    variables |= {name: options.env.get(name, os.environ.get(name, default)) for name, default in ALLOCATOR.items()}

    bootstrap = functools.partial(_prepare_process, settings, options.env, gpus, options.memory_gb)
    arguments = ["-m", PROGRAM] if server is None else server.launcher(PROGRAM)
    command = None if hosts.own_program else BootstrapCommand(sys.executable, None, arguments, variables)
    return mesh.spawn_procs({"procs": procs}, bootstrap=bootstrap, name=name, bootstrap_command=command)


def library_environment(threads: int = 1) -> dict[str, str]:
    """Return the environment variables that the libraries of a new process need, in addition to the controller's.

    Args:
        threads: number of compute threads.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        # Idle OpenMP workers otherwise spin on the cores that another process is computing on.
        "GOMP_SPINCOUNT": "2000",
        "TOKENIZERS_PARALLELISM": "false",
        # Progress bars of several processes would be written over one another.
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **{name: os.environ.get(name, value) for name, value in ALLOCATOR.items()},
        **_compiler_caches(),
        # Ranks listen at the loopback only; by default they would at the address of the host name.
        **{name: os.environ.get(name, "lo") for name in INTERFACES},
    }


def _compiler_caches() -> dict[str, str]:
    """Return the variables in COMPILERS, each with its folder in this user's cache, or as the environment sets it.

    Folders without write access are omitted, because importing PyTorch fails if it cannot create them.
    """
    folders = {}
    for name, folder in COMPILERS.items():
        try:
            path = cache_folder() / folder
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            log.debug("%s: %s", name, error)
            continue
        if os.access(path, os.W_OK | os.X_OK):
            folders[name] = str(path)
    return folders | {name: os.environ[name] for name in COMPILERS if name in os.environ}


def _prepare_process(
    settings: dict[str, str], extra: dict[str, str], gpus: dict[str, list[str]], memory_gb: float | None
) -> None:
    """Prepare a new process before its actors start: environment, name, limits, signals.

    Args:
        settings: environment variables of forge.
        extra: environment variables of the user, which take precedence.
        gpus: the devices that it may see, by the address of its host.
        memory_gb: limit of its private memory, in GB; None does not limit it.
    """
    devices = gpus.get(os.environ.get(HOST, ""), [])

    # An empty CUDA_VISIBLE_DEVICES (the first of VISIBLE) hides all devices. An empty ZE_AFFINITY_MASK hides nothing:
    # it is set only if there are devices.
    visible = {name: ",".join(devices) for name in (*VISIBLE, GRANTED) if devices or name == VISIBLE[0]}
    os.environ.update({**settings, **visible, **extra})
    with suppress(OSError):
        Path(f"/proc/self/task/{os.getpid()}/comm").write_text(settings[PROCESS_NAME])  # what top and ps show
    configure_logging()

    if memory_gb is not None:
        limit = int(memory_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    libc = ctypes.CDLL(None)

    # Where the kernel lets only ancestors look into a process, py-spy, a sibling, could not show where it hangs.
    libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)

    # A terminal sends SIGINT (Ctrl-C) and SIGHUP (when it closes) to every process, a scheduler SIGTERM. Only the
    # controller acts on them, so that the shutdown has one owner. Set through libc, because Python's signal module
    # works in the main thread only, and this is another one.
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    for signal_number in (signal.SIGINT, signal.SIGHUP):
        libc.signal(signal_number, ctypes.c_void_p(1))  # SIG_IGN

    # SIGTERM is not ignored, as that would be inherited by programs that a component starts, and SIGTERM is how it ends
    # them. A handler is not inherited. The handler here is getpid, a function without effect.
    libc.signal(signal.SIGTERM, ctypes.cast(libc.getpid, ctypes.c_void_p))
