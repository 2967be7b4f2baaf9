"""Messages between a worker and its process: a JSON header, and bodies of bytes."""

import json
import os
import struct
from collections.abc import Callable
from typing import Any

Header = dict[str, Any]
Settings = dict[str, Any]  # of a sandbox


def pack_message(header: Header, *bodies: bytes) -> bytes:
    """Return the bytes of a message: the JSON's length, the JSON of the header and the bodies' lengths, the bodies."""
    text = json.dumps([header, [len(body) for body in bodies]]).encode()
    return b"".join([struct.pack("I", len(text)), text, *bodies])


def send_message(control: int, header: Header, *bodies: bytes) -> None:
    """Write a message to the descriptor of a socket."""
    view = memoryview(pack_message(header, *bodies))
    while view:
        view = view[os.write(control, view) :]


def unpack_message(read: Callable[[int], bytes]) -> tuple[Header, list[bytes]]:
    """Read the next message, and return its header and bodies.

    Args:
        read: returns at most the given number of bytes; b"" at the end of the stream.

    Raises:
        EOFError: the stream ended within the message.
    """

    def read_exactly(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = read(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError("the connection to the sandbox process was closed")
            parts += part
        return bytes(parts)

    header, sizes = json.loads(read_exactly(struct.unpack("I", read_exactly(4))[0]))
    return header, [read_exactly(size) for size in sizes]
