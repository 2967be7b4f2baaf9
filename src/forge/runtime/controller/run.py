"""The beginning and the end of a run.

`run(main())` owns the event loop. However `main` ends (return, exception, Ctrl-C, SIGTERM, SIGHUP, a lost component
without a replacement), every service is stopped and every process is gone before `run` returns.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..names import HOSTS
from .errors import ForgeError
from .runtime import runtime, shutdown
from .types import Pending

T = TypeVar("T")
log = logging.getLogger(__name__)

# Seconds that `main` may take over its clean-up once it is cancelled, before the services are stopped under it.
STOP_PATIENCE = 5.0
# Stops the run of this process; None outside of a run.
_interrupt: Callable[[], object] | None = None
# Asks the run to save its state and end, for a reason.
_preempt: Callable[[str], bool] | None = None


async def first_to_end(*loops: Pending[object]) -> None:
    """Run loops side by side until one ends, then cancel the others. An exception in one of them ends all, and is
    raised as itself."""
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
            # A task group wraps even a single failure; the first one is the cause of the others. Its cause stays: of
            # a failure in another process it is that process's traceback.
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
    """Run a recipe to its end and leave no process behind.

    Args:
        hosts: HOST:PORT of other machines to use, or the path of a file of them; None reads FORGE_HOSTS.
        wait_for_hosts: seconds that a service without any replica waits for one of them.
        on_preemption: called with the name of the first SIGTERM or SIGUSR1, which then does not stop the run: `main` is
            expected to save its state and return soon.

    Raises:
        what `main` raised; ReplicaDied when a component was lost for good; SystemExit(128 + number) after SIGINT,
        SIGTERM or SIGHUP.
    """

    async def attach_and_run() -> T:
        others = hosts or os.environ.get(HOSTS)
        if others:
            placement = runtime().placement
            try:
                await placement.attach(others, wait_for_hosts)
            except BaseException:
                main.close()  # Python warns of a coroutine that was never awaited
                raise
            assert placement.machines is not None
            placement.machines.when_leaving(lambda reason: _preempt(reason) if _preempt is not None else None)
        return await main

    return asyncio.run(_run_main(attach_and_run(), on_preemption))


async def _run_main(main: Pending[T], on_preemption: Callable[[str], None] | None = None) -> T:
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[signal.Signals] = loop.create_future()
    global _interrupt, _preempt

    def preempt_once(reason: str) -> bool:
        # Once only: the second signal stops the run.
        nonlocal on_preemption
        call, on_preemption = on_preemption, None
        if call is not None:
            log.warning("%s: ending as soon as all is saved (once more to stop at once)", reason)
            call(reason)
        return call is not None

    _preempt = preempt_once

    # A scheduler sends SIGTERM or SIGUSR1 before it takes the machine: the run may save itself first.
    def on_signal(number: signal.Signals) -> None:
        if number in (signal.SIGTERM, signal.SIGUSR1) and preempt_once(number.name):
            return
        if interrupted.done():
            os._exit(128 + number)  # asked twice: the children end with this process
        log.warning("%s: stopping (once more to stop at once)", number.name)
        interrupted.set_result(number)

    _interrupt = lambda: loop.call_soon_threadsafe(on_signal, signal.SIGINT)  # noqa: E731
    # Python handles signals in the main thread only; a run in another thread ends with its caller.
    if threading.current_thread() is threading.main_thread():
        # Under nohup, SIGHUP is ignored: the run outlives its terminal.
        hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hangup):
            loop.add_signal_handler(number, on_signal, number)

    task = loop.create_task(main)
    try:
        failure = runtime().failure
        endings: set[asyncio.Future[Any]] = {task, interrupted, failure}
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)

        # A ForgeError of `main` may be a consequence of a lost component, which is raised in its place below.
        if task.done() and not isinstance(task.exception(), ForgeError):
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_PATIENCE)
        if failure.done():
            # The component that was lost first is the cause; what its callers saw follows from it.
            raise failure.result()
        if interrupted.done():
            raise SystemExit(128 + interrupted.result())
        return task.result()
    finally:
        _interrupt = None
        _preempt = None
        await shutdown()


def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work()`, which calls `run`, in a new thread: for callers whose thread has a running event loop, such as a
    notebook's. Ctrl-C in the caller's thread stops the run.

    Raises:
        what `work` raised.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="forge-run") as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                if _interrupt is not None:
                    _interrupt()
