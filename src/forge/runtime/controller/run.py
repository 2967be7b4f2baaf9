"""Run a recipe: `run(main())` starts the event loop, and stops everything at the end.

However `main` ends (return, exception, Ctrl-C, SIGTERM, SIGHUP, a lost component without a replacement), every service
is stopped and every process has ended before `run` returns.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ..names import HOSTS
from .errors import ForgeError
from .runtime import runtime, shutdown
from .types import Pending

T = TypeVar("T")
log = logging.getLogger(__name__)

# Seconds that `main` may take for its clean-up once it is cancelled; then the services are stopped all the same.
STOP_PATIENCE = 5.0
# Stops the run of this process, from any thread; None outside of a run.
_interrupt: Callable[[], object] | None = None
# Asks the run of this process to save its state and end, for the given reason; None outside of a run.
_preempt: Callable[[str], bool] | None = None


async def first_to_end(*loops: Pending[object]) -> None:
    """Run coroutines concurrently until the first one ends, then cancel the others.

    Raises:
        Exception: what the first one raised; of an exception group only its first exception.
    """
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    for task in ended:
        try:
            task.result()
        except BaseExceptionGroup as group:
            # A task group wraps even a single failure, and the first failure is the cause of the others. `from` keeps
            # its own cause, which is the remote traceback of a failure in another process.
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from first.__cause__


def run(
    main: Pending[T],
    hosts: str | Sequence[str] | None = None,
    wait_for_hosts: float = 600.0,
    *,
    on_preemption: Callable[[str], None] | None = None,
) -> T:
    """Run the coroutine of a recipe to its end, and return its value; no process is left behind.

    Args:
        hosts: HOST:PORT of other machines to use, or the path of a file of them; None reads FORGE_HOSTS.
        wait_for_hosts: seconds that a service without any replica waits for one of them.
        on_preemption: called with the name of the first SIGTERM or SIGUSR1, which then does not stop the run: `main` is
            expected to save its state and return soon.

    Raises:
        ReplicaDied: a component was lost for good.
        SystemExit: with the code 128 + number, after SIGINT, SIGTERM or SIGHUP.
        Exception: what `main` raised.
    """

    async def attach_and_run() -> T:
        machine_addresses = hosts or os.environ.get(HOSTS)
        if machine_addresses:
            placement = runtime().placement
            try:
                await placement.attach(machine_addresses, wait_for_hosts)
            except BaseException:
                main.close()  # otherwise Python warns of a coroutine that was never awaited
                raise
            assert placement.machines is not None
            placement.machines.when_leaving(lambda reason: _preempt(reason) if _preempt is not None else None)
        return await main

    return asyncio.run(_run_main(attach_and_run(), on_preemption))


async def _run_main(main: Pending[T], on_preemption: Callable[[str], None] | None = None) -> T:
    # Run `main` until it ends, a signal comes, or a vital component is lost; then shut everything down.
    global _interrupt, _preempt
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[signal.Signals] = loop.create_future()

    # Returns whether the run is asked to save itself. Once only: the second signal stops the run.
    def preempt_once(reason: str) -> bool:
        nonlocal on_preemption
        call, on_preemption = on_preemption, None
        if call is not None:
            log.warning("%s: stopping once the run is saved (send the signal again to stop immediately)", reason)
            call(reason)
        return call is not None

    # A scheduler sends SIGTERM or SIGUSR1 before it takes the machine: the run may save itself first.
    def on_signal(signal_number: signal.Signals) -> None:
        if signal_number in (signal.SIGTERM, signal.SIGUSR1) and preempt_once(signal_number.name):
            return
        if interrupted.done():
            os._exit(128 + signal_number)  # the second signal: the children end with this process
        log.warning("%s: stopping (send the signal again to stop immediately)", signal_number.name)
        interrupted.set_result(signal_number)

    _preempt = preempt_once
    _interrupt = partial(loop.call_soon_threadsafe, on_signal, signal.SIGINT)

    # Python handles signals in the main thread only; a run in another thread ends with its caller.
    if threading.current_thread() is threading.main_thread():
        # Under nohup, SIGHUP is ignored: the run outlives its terminal.
        hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hangup):
            loop.add_signal_handler(signal_number, on_signal, signal_number)

    task = loop.create_task(main)
    try:
        failure = runtime().failure
        endings: set[asyncio.Future[Any]] = {task, interrupted, failure}
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)

        # `main` has ended by itself, with a value or an error.
        if task.done() and not isinstance(task.exception(), ForgeError):
            return task.result()

        # A ForgeError of `main` may only be a consequence of a lost component: that is raised instead, as the cause.
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_PATIENCE)
        if failure.done():
            raise failure.result()
        if interrupted.done():
            raise SystemExit(128 + interrupted.result())
        return task.result()
    finally:
        _interrupt = _preempt = None
        await shutdown()


def run_in_thread(work: Callable[[], T]) -> T:
    """Call `work()`, which calls `run`, in a new thread, and return its value.

    It is for callers whose own thread has a running event loop, such as a notebook's. Ctrl-C stops the run.

    Raises:
        Exception: what `work` raised.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="forge-run") as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                # The run ends in order, and its result or error comes with the next round.
                if _interrupt is not None:
                    _interrupt()
