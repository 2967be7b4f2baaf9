"""The processes of a replica: how they are started, and watched until they end."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...observability.console import configure_logging, log_failure
from ...observability.metrics import PROCESS_NAME
from ...system.devices import GRANTED
from ...system.files import cache_folder
from ..cluster import HOST
from ..cluster.inventory import VISIBLE
from ..cluster.process import Activity, Process, Watched, machine_id
from ..forking.standby import PROGRAM
from ._monarch import BootstrapCommand, HostMesh, ProcMesh
from .actor_host import ActorHost
from .errors import ForgeError
from .hosts import Hosts
from .options import Options
from .patience import Patience, wait_for
from .starting import Standbys
from .user_meshes import UserProcs

if TYPE_CHECKING:
    from .replica import Replica


log = logging.getLogger(__name__)

STOP_PATIENCE = 8.0  # seconds, as of `Patience`, in which a process mesh may stop by itself
# Seconds, as of `Patience`, for a process of which nothing tells whether it gets a core, as on a host of a user's job
# that is lost: about a minute, after which Monarch gives it up as well.
UNSEEN_PATIENCE = 30.0
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
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class ProcessGroup:
    """The processes of one replica, or those that components share.

    `starting` counts the components that are being built in them: importing large libraries can hold the interpreter
    for seconds, during which silence is not a hang. When a process is lost, `fail` is called on all `members`.
    """

    def __init__(
        self,
        name: str,
        mesh: ProcMesh,
        options: Options,
        hosts: Hosts,
        standbys: Standbys | None = None,
        *,
        shared: bool = False,
    ) -> None:
        self._standbys = standbys
        self.name = name
        self.mesh = mesh
        self.options = options
        self.hosts = hosts
        self.shared = shared
        self.borrowed = isinstance(hosts, UserProcs)  # the processes are the user's
        # One in each process.
        self.actor_host: Any = mesh.spawn(name, ActorHost, name if self.borrowed else None, hosts.controller())
        self.members: list[Replica] = []
        self.starting = 0
        self.dead: str | None = None
        self.stopped_by_signal = False
        self.processes: list[Watched] = []
        self._known: set[tuple[int, str]] = set()
        self._pinging: asyncio.Task | None = None
        hosts.when_lost(self.fail)

    @property
    def pids(self) -> list[int]:
        """Process ids, one per rank."""
        return [process.pid for process in self.processes]

    @property
    def local_pids(self) -> list[int]:
        """Process ids on this machine."""
        return [process.pid for process in self.processes if isinstance(process, Process)]

    @property
    def procs(self) -> int:
        """Number of processes."""
        return self.options.share_procs if self.options.share is not None else self.options.procs

    def check_options(self, component: str, options: Options) -> None:
        """Raise ValueError if the options of a component that is to share these processes ask for other ones."""
        for name in ("share_procs", "with_gpus", "gpus_per_proc", "threads", "env", "memory_gb", "ping_timeout"):
            started_with = getattr(self.options, name)
            requested = getattr(options, name)
            if started_with != requested:
                raise ValueError(
                    f"{component} shares the process {self.name!r}, which was started with {name} = {started_with!r}; "
                    f"it asks for {requested!r}"
                )

    def watch(self, processes: list[tuple[int, str]]) -> None:
        """Watch the end and the answers of these processes from now on, given as (process id, host)."""
        for pid, host in processes:
            if (pid, host) not in self._known:
                self._known.add((pid, host))
                location = "" if host == machine_id() else f" on {host.partition(' ')[0]}"
                reason = f"process {pid}{location} ended"
                self.processes.append(self.hosts.process(pid, host, lambda reason=reason: self.fail(reason)))  # type: ignore[misc]
        if self._pinging is None:
            self._pinging = asyncio.get_running_loop().create_task(self._ping())
            self._pinging.add_done_callback(log_failure)

    def fail(self, reason: str, *, by_clock: bool = False) -> None:
        """Declare these processes lost, and with them every component that they host.

        Args:
            by_clock: Monarch gave up the actor in them, as they gave no answer for some time.
        """
        if self.dead is None:
            self.dead = reason
            self.stopped_by_signal = any(process.stopped for process in self.processes)
            if self.stopped_by_signal:
                self.dead += ": it was stopped by a signal"
            self.kill()
            # A user's processes live on, hung, or are dead for good: either way nothing is started in them again. After
            # a pause of the machine they live, and only the actor is lost.
            if self.borrowed and not (by_clock and all(process.alive for process in self.processes)):
                self.hosts.give_up()
            for member in list(self.members):
                member.fail(self.dead)

    def kill(self) -> None:
        """SIGKILL to all processes."""
        for process in self.processes:
            process.kill()

    async def stop(self) -> None:
        """Stop the processes, by force if they do not react; cancelling this kills them at once."""
        if self._pinging is not None:
            self._pinging.cancel()
        gentle = self.dead is None
        self.dead = self.dead or "it was shut down"
        if not gentle:
            self.kill()
        try:
            stopping = self.actor_host.stop() if self.borrowed else self.mesh.stop()
            await wait_for(stopping.as_asyncio(), self.local_pids, STOP_PATIENCE)
        except Exception as error:
            # A mesh with a dead process cannot stop; all that matters is that its processes end.
            if gentle:
                outcome = "it is left to its owner" if self.borrowed else "killed it"
                log.warning("%s: could not be stopped gently (%s); %s", self.name, type(error).__name__, outcome)
        finally:
            for process in self.processes:
                process.kill()
                process.close()
            if self._standbys is not None:
                self._standbys.close()

    async def _ping(self) -> None:
        """Fail the processes once they are hung.

        Two pings in a row without an answer, to them or to any call, are a hang if a process had the CPU time for one
        or did not want any, as its machine says. A single one may be the controller's own slowness, and behind
        thousands of calls a ping waits for its turn.
        """
        # Two intervals and two waits, of an eighth and three eighths each, add up to `ping_timeout`.
        interval = self.options.ping_timeout / 8
        patience = 3 * self.options.ping_timeout / 8
        # By process, and whether nothing tells what it does, which may change.
        silence: dict[tuple[Watched, bool], Patience] | None = None
        missed = 0
        silent_since = time.monotonic()
        while self.dead is None:
            await asyncio.sleep(interval)
            if self.starting or not self.members:
                silence = None
                missed = 0
                continue
            # A component with a rank in every process answers for all of them; light replicas only for one.
            spanning = [member for member in self.members if member.options.procs == self.procs]
            pinged = spanning[:1] or list(self.members)
            sent = time.monotonic()
            if silence is None:
                local = [process for process in self.processes if isinstance(process, Process)]
                silence = {(process, False): Patience.of([process.pid], patience) for process in local}
                silent_since = sent
            answers = await asyncio.gather(*(member.ping(patience) for member in pinged))
            # The answer to any call counts as well as that to a ping.
            answered = [ok or member.last_answer > sent for ok, member in zip(answers, pinged, strict=True)]
            if all(answered) or any(member.last_answer > sent for member in spanning):
                silence = None
                missed = 0
                continue
            missed += 1
            hung = []
            for process, activity in await self._activities():
                key = process, activity is None
                if key not in silence:
                    # Elsewhere: a machine is only asked once a ping was missed, by when half of the time is over.
                    silence[key] = _silence(process, activity, patience / 2)
                elif not silence[key].is_left({} if activity is None else {process.pid: activity}):
                    hung.append(silence[key])
            if self.borrowed:
                # Other actors run there too: while one of them is made, which imports its modules for the first time
                # for seconds of CPU time, no other is served. Only a process that wants no CPU is silent.
                hung = [limit for limit in hung if limit.idle >= limit.seconds]
            if missed >= 2 and not self.starting and hung:
                self.fail(f"it answered neither a ping nor a call for {time.monotonic() - silent_since:.3g} s")

    async def _activities(self) -> list[tuple[Watched, Activity | None]]:
        """What each process does."""
        processes = list(self.processes)
        activities = await asyncio.gather(*(process.activity() for process in processes))
        return list(zip(processes, activities, strict=True))


def _silence(process: Watched, activity: Activity | None, seconds: float) -> Patience:
    """The limit of a process that begins to be silent."""
    if activity is None:
        return Patience({}, UNSEEN_PATIENCE)
    return Patience({process.pid: activity}, seconds)


def spawn(
    host: HostMesh,
    name: str,
    procs: int,
    options: Options,
    gpus: dict[str, list[str]],
    variables: dict[str, str],
    standbys: Standbys | None = None,
    *,
    spans_machines: bool = False,
    default_program: bool = False,
) -> ProcMesh:
    """Start `procs` processes on each host of a host mesh.

    Args:
        gpus: the devices that the processes may see, by the address of their host.
        variables: environment variables that must be there before the processes start.
        standbys: the processes, if they were started before.
        default_program: start what the hosts start by default; another machine may have another Python.
    """
    settings = {**environment(options.threads), PROCESS_NAME: name}
    # The loopback reaches no other machine: NCCL chooses the interface, unless the user did.
    if spans_machines and "NCCL_SOCKET_IFNAME" not in os.environ:
        del settings["NCCL_SOCKET_IFNAME"]
    bootstrap = functools.partial(_bootstrap, settings, options.env, gpus, options.memory_gb)
    arguments = ["-m", PROGRAM] if standbys is None else standbys.command
    command = None if default_program else BootstrapCommand(sys.executable, None, arguments, variables)
    return host.spawn_procs({"procs": procs}, bootstrap=bootstrap, name=name, bootstrap_command=command)


def environment(threads: int = 1) -> dict[str, str]:
    """Return the environment variables of a process for its libraries, in addition to the controller's."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Idle OpenMP workers otherwise spin on the cores that another process is computing on.
        "GOMP_SPINCOUNT": "2000",
        "TOKENIZERS_PARALLELISM": "false",
        # One loading bar from each process at once is noise.
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **{name: os.environ.get(name, value) for name, value in ALLOCATOR.items()},
        **_compiler_caches(),
        # Ranks listen at the loopback, those of gloo on several machines as well. Otherwise at the host name's address.
        **{name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")},
    }


def _compiler_caches() -> dict[str, str]:
    """The folders of COMPILERS, except those that cannot be created: PyTorch creates them when it is imported."""
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


def allocator_settings(options: Options) -> dict[str, str]:
    """Return the allocator's variables, which must be in the environment before the process starts."""
    return {name: options.env.get(name, os.environ.get(name, value)) for name, value in ALLOCATOR.items()}


def _bootstrap(
    settings: dict[str, str], extra: dict[str, str], gpus: dict[str, list[str]], memory_gb: float | None
) -> None:
    """Set environment and limits of a new process, and leave Ctrl-C to the controller. Runs before its actors."""
    devices = gpus.get(os.environ.get(HOST, ""), [])
    # An empty ZE_AFFINITY_MASK hides nothing: it is set only if there are devices.
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
    # A terminal sends Ctrl-C, or SIGHUP when it closes, to every process, a scheduler SIGTERM; only the controller acts
    # on it, so that the shutdown has one owner. A standby process has done the same.
    # Python's signal module works in the main thread only, and this is another one.
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    for number in (signal.SIGINT, signal.SIGHUP):
        libc.signal(number, ctypes.c_void_p(1))  # SIG_IGN
    # What is ignored stays so in programs that a component starts, and SIGTERM is how it ends them. A handler does not;
    # getpid is a function that does nothing.
    libc.signal(signal.SIGTERM, ctypes.cast(libc.getpid, ctypes.c_void_p))


def take_gpus(free: list[str], count: int, component: str) -> list[str]:
    """Take `count` devices from `free`, or raise an error that names the shortage."""
    if count > len(free):
        raise ForgeError(
            f"{component} asks for {count} GPUs and {len(free)} are free on this host: lower procs or num_replicas, "
            f"or set with_gpus to false (--services.{component}.with_gpus false)"
        )
    devices = free[:count]
    free[:] = free[count:]
    return devices
