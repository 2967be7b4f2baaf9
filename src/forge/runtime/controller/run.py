"""The beginning and the end of a run.

`run(main())` owns the event loop. However `main` ends (return, exception, Ctrl-C, SIGTERM, SIGHUP, a lost component
without a replacement), every service is stopped and every process is gone before `run` returns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .errors import ForgeError
from .runtime import attach, runtime, shutdown

T = TypeVar("T")
log = logging.getLogger(__name__)

# How long `main` may take over its own clean-up after it was asked to stop.
STOP_PATIENCE = 5.0
# Stops the run of this process; None where there is none.
_interrupt: Callable[[], Any] | None = None
# Asks it to save itself and end.
_preempt: Callable[[str], Any] | None = None


async def first_to_end(*loops: Coroutine[Any, Any, Any]) -> None:
    """Run loops side by side until one ends, then cancel the others. An exception in any of them ends all, and is
    raised as itself."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        try:
            task.result()
        except BaseExceptionGroup as group:
            # A task group wraps even a single failure; the first one is the cause of the rest. Its own cause stays: of
            # a failure in another process it is the traceback there.
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from first.__cause__


def run(
    main: Coroutine[Any, Any, T],
    hosts: str | Sequence[str] | None = None,
    wait_for_hosts: float = 600.0,
    *,
    on_preemption: Callable[[str], None] | None = None,
) -> T:
    """Run a recipe to its end and leave no process behind.

    Args:
        hosts, wait_for_hosts: other machines to take into the run, see `attach`.
        on_preemption: called with the name of the first SIGTERM or SIGUSR1, which then does not end the run: `main` is
            to end soon.

    Raises:
        what `main` raised; ReplicaDied when a component was lost for good; SystemExit(128 + number) after SIGINT,
        SIGTERM or SIGHUP.
    """

    async def attached() -> T:
        try:
            await attach(hosts, wait_for_hosts)
        except BaseException:
            main.close()  # it was never started, and says so otherwise
            raise
        if (pool := runtime().pool) is not None:
            pool.on_leaving = lambda why: None if _preempt is None else _preempt(why)
        return await main

    return asyncio.run(_run(attached(), on_preemption))


async def _run(main: Coroutine[Any, Any, T], on_preemption: Callable[[str], None] | None = None) -> T:
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[signal.Signals] = loop.create_future()
    global _interrupt, _preempt

    def preempt(why: str) -> bool:
        nonlocal on_preemption
        call, on_preemption = on_preemption, None
        if call is not None:
            log.warning("%s: ending as soon as all is saved (once more to stop at once)", why)
            call(why)
        return call is not None

    _preempt = preempt

    def on_signal(number: signal.Signals) -> None:
        if number in (signal.SIGTERM, signal.SIGUSR1) and preempt(number.name):
            return
        if interrupted.done():
            os._exit(128 + number)  # asked twice: the children end with this process
        log.warning("%s: stopping (once more to stop at once)", number.name)
        interrupted.set_result(number)

    _interrupt = lambda: loop.call_soon_threadsafe(on_signal, signal.SIGINT)  # noqa: E731
    # Python handles signals in the main thread alone; a run in another thread ends with its caller.
    if threading.current_thread() is threading.main_thread():
        # Under nohup, SIGHUP is ignored: the run outlives its terminal.
        hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hangup):
            loop.add_signal_handler(number, on_signal, number)
    task = loop.create_task(main)
    try:
        dead = runtime().failure
        waits: set[asyncio.Future[Any]] = {task, interrupted, dead}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not isinstance(task.exception(), ForgeError):
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_PATIENCE)
        if dead.done():
            # The component that was lost first is the cause; what its callers saw follows from it.
            raise dead.result()
        if interrupted.done():
            raise SystemExit(128 + interrupted.result())
        return task.result()
    finally:
        _interrupt = _preempt = None
        await shutdown()


def run_in_thread(work: Callable[[], T]) -> T:
    """`work()`, which calls `run`, in a thread of its own: for callers whose thread has a running event loop, such as a
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
