"""Messages between a controller and the daemons of its hosts: JSON, one a line, over mutual TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

from .credentials import NAME, Credentials

PORT = 7070
# Seconds of silence after which either end counts the other as lost. A host ends its processes then.
LEASE = 4.0
BEAT = LEASE / 8
CONNECT_TIMEOUT = 5.0
LONGEST = 1 << 20  # bytes of a message


class HostError(RuntimeError):
    """What a host answered instead of doing what it was asked for."""


async def connect(address: str, credentials: Credentials) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the daemon at HOST:PORT.

    Raises:
        OSError: it cannot be reached or does not accept this peer; says which and what to check.
    """
    host, port = split(address)
    context = credentials.context(server=False)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            return await asyncio.open_connection(host, port, ssl=context, server_hostname=NAME, limit=LONGEST)
    except TimeoutError:
        raise ConnectionError(f"host {address} gave no answer within {CONNECT_TIMEOUT:g} s") from None
    except OSError as error:
        raise explained(error, address) from None


def explained(error: OSError, address: str) -> OSError:
    """An error of a connection to `address`, with what to do about it."""
    text = str(error).upper().replace(" ", "_")
    if "EXPIRED" in text:
        return ConnectionError(f"host {address}: a certificate has expired; start the workers again: {error}")
    if isinstance(error, ssl.SSLError):
        return ConnectionError(
            f"host {address} has another secret, or something else listens there: give every machine of a run the "
            f"same FORGE_SECRET ({error})"
        )
    if isinstance(error, ConnectionRefusedError):
        return ConnectionError(f"no worker listens at {address}: start one there with `forge worker`")
    return ConnectionError(f"host {address}: {error}")


def split(address: str) -> tuple[str, int]:
    """HOST:PORT, HOST, or [IPv6]:PORT as a pair.

    Raises:
        ValueError: it is none of these.
    """
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r} is no HOST:PORT; IPv6 addresses are written as [ADDRESS]:PORT")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is no HOST:PORT: {port!r} is no port")
    return host, int(port)


async def receive(reader: asyncio.StreamReader, timeout: float | None = LEASE) -> dict[str, Any] | None:
    """The next message; None when the other end has closed the connection.

    Raises:
        TimeoutError: there was none in time. ValueError: it is no message. OSError: the connection is lost.
    """
    async with asyncio.timeout(timeout):
        line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {line[:80]!r}")
    return message


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message; it is buffered, and lost with the connection."""
    if not writer.is_closing():  # asyncio's TLS transport raises AttributeError otherwise
        writer.write(json.dumps(message).encode() + b"\n")


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until either end closes."""
    try:
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
    except OSError:
        return  # one end was lost: the other is closed below, and its peer sees that
    finally:
        writer.close()
