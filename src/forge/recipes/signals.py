"""Signals before a run's loop starts; `controller.run` has the rest."""

import os
import signal
import threading


def end_at_signals() -> None:
    """Have SIGINT and SIGTERM end this program with one line and the exit code 128 + number of the signal.

    Signals that are ignored or already handled stay so, and outside the main thread nothing changes. No cleaning up is
    needed: the kernel frees what the program holds, and its child processes end with it.
    """

    def raise_interrupt(signal_number: int, _: object) -> None:
        os.write(2, f"forge: {signal.Signals(signal_number).name}: ended before the run started\n".encode())
        os._exit(128 + signal_number)

    if threading.current_thread() is not threading.main_thread():
        return

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signal_number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signal_number, raise_interrupt)
