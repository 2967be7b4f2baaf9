"""Messages between a controller and the daemons of its hosts: JSON, one a line, over mutual TLS."""

import asyncio
import json
import ssl
from typing import Any

from .credentials import NAME, Credentials

Json = Any  # a value of JSON
Message = dict[str, Json]

PORT = 7070  # default of daemons; the controller listens at none
# Seconds of silence after which either end counts the other as lost, and a host ends the processes of the run. Eight
# beats are sent in that time, so that a lost packet or a busy moment does not end a run.
LEASE = 4.0
BEAT = LEASE / 8
CONNECT_TIMEOUT = 5.0  # seconds; a machine that is up answers in milliseconds
MAX_MESSAGE = 1 << 20  # bytes; the longest messages contain an environment


class HostError(RuntimeError):
    """Error that a host reported for a request."""


async def connect_host(address: str, credentials: Credentials) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the daemon at HOST:PORT, and return the reader and the writer of the connection.

    Raises:
        OSError: it cannot be reached or does not accept this peer; the message has the fix.
    """
    host, port = split_address(address)
    context = credentials.context(server=False)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            return await asyncio.open_connection(host, port, ssl=context, server_hostname=NAME, limit=MAX_MESSAGE)
    except TimeoutError:
        raise ConnectionError(f"host {address} did not respond within {CONNECT_TIMEOUT:g} s") from None
    except OSError as error:
        raise with_fix(error, address) from None


def with_fix(error: OSError, address: str) -> OSError:
    """Return a connection error for `address` with a message that says what to do."""
    problems = (
        (
            "EXPIRED" in str(error).upper(),
            f"host {address}: a certificate has expired; start the workers again: {error}",
        ),
        (
            isinstance(error, ssl.SSLError),
            f"host {address} has another secret, or something else listens there: give every machine of a run the "
            f"same FORGE_SECRET ({error})",
        ),
        (
            isinstance(error, ConnectionRefusedError),
            f"no worker listens at {address}: start one there with `forge worker`",
        ),
        (True, f"host {address}: {error}"),
    )
    return ConnectionError(next(text for is_it, text in problems if is_it))


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, HOST or [IPv6]:PORT; without a port, the default.

    Raises:
        ValueError: the address has another form.

    >>> split_address("node1:7070")
    ('node1', 7070)
    >>> split_address("[::1]")
    ('::1', 7070)
    """
    host, colon, port = address.rpartition(":")
    # The last colon of [IPv6] is part of the address.
    if not colon or address.endswith("]"):
        host, port = address, str(PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r} is not HOST:PORT; IPv6 addresses are written as [ADDRESS]:PORT")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT: {port!r} is not a port")
    return host, int(port)


async def receive_message(reader: asyncio.StreamReader, timeout: float | None = LEASE) -> Message | None:
    """Return the next message; None when the other end has closed the connection.

    Raises:
        TimeoutError: none came within `timeout` seconds.
        ValueError: what came is not a message.
        OSError: the connection is lost.
    """
    async with asyncio.timeout(timeout):
        line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {line[:80]!r}")
    return message


def send_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Write a message to the buffer of a connection; it is lost if the connection is."""
    if not writer.is_closing():  # asyncio's TLS transport raises AttributeError otherwise
        writer.write(json.dumps(message).encode() + b"\n")
