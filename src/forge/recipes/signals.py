"""Signals before a run's loop starts; `controller.run` has the rest."""

import os
import signal
import threading


def end_at_signals() -> None:
    """Have this program end with one line and 128 + number at SIGINT and SIGTERM.

    The kernel frees what it holds, and its processes end with it. Nothing changes in other threads, and where a signal
    is ignored or handled already.
    """

    def raise_interrupt(number: int, _: object) -> None:
        os.write(2, f"forge: {signal.Signals(number).name}: ended before the run started\n".encode())
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, raise_interrupt)
