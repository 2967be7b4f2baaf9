"""Formatting of addresses at which servers listen, and of the errors for them."""

import errno
import os
import re


def join_address(host: str, port: int) -> str:
    """Join a host and a port as HOST:PORT.

    >>> join_address("::1", 8000)
    '[::1]:8000'
    >>> join_address("node1", 8000)
    'node1:8000'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_error(host: str, port: int, error: OSError | OverflowError, any_port: str) -> OSError:
    """Return an error that says why a server cannot listen at an address, and what to do.

    Args:
        error: what opening the socket has raised; OverflowError for a port out of range.
        any_port: the option with which the command takes a free port, such as `--port 0`.
    """
    number = error.errno if isinstance(error, OSError) else None
    # The system's text for the number, without the address, which asyncio and socket.create_server add to it. Errors of
    # name resolution have negative numbers, for which there is no such text.
    reason = os.strerror(number) if number and number > 0 else re.sub(r"\[Errno .*?\] | \(while .*|\.$", "", str(error))
    fixes = {
        errno.EADDRINUSE: f"stop what listens there, or choose another port ({any_port}: any that is free)",
        errno.EACCES: f"choose a port above 1023 ({any_port}: any that is free)",
        None: "choose a port from 0 to 65535",
    }
    fix = fixes.get(number, "choose an address of this machine")
    return OSError(f"cannot listen at {join_address(host, port)}: {reason}: {fix}")
