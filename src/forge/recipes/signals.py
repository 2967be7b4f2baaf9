"""Signals outside of a run's loop: before it begins, and while its report is written. `controller.run` has the rest."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def end_at_signals(message: str = "ended before the run began") -> None:
    """Have this program end with one line and 128 + number at SIGINT and SIGTERM. The kernel frees what it holds, and
    its processes end with it. Nothing changes in other threads and where a signal is ignored or handled already."""

    def end(number: int) -> None:
        _say(number, message)
        os._exit(128 + number)

    _handle(end)


@contextmanager
def finishing(message: str) -> Iterator[None]:
    """Within this context the first SIGINT or SIGTERM is answered by a line, and another one ends the program.

    Raises:
        SystemExit(130): at its end, where that signal was SIGINT.
    """
    received: list[int] = []

    def note(number: int) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        _say(number, f"{message} (once more to stop at once)")

    before = {number: signal.getsignal(number) for number in NUMBERS}
    _handle(note, again=True)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
    if received and received[0] == signal.SIGINT:
        raise SystemExit(128 + signal.SIGINT)


def _handle(act: Callable[[int], None], *, again: bool = False) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in NUMBERS:
        handler = signal.getsignal(number)
        usual = handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, _Handler)
        if usual or (again and handler != signal.SIG_IGN):
            signal.signal(number, _Handler(act))


class _Handler:
    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._act(number)


def _say(number: int, message: str) -> None:
    # A separate write: a signal may come while another line is being printed.
    os.write(2, f"forge: {signal.Signals(number).name}: {message}\n".encode())
