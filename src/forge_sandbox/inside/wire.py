"""Messages: length, JSON header, and bodies of bytes with their sizes in the header."""

import json
import os
import struct
from collections.abc import Callable
from typing import Any

Header = dict[str, Any]
Settings = dict[str, Any]  # of a sandbox


def pack_message(header: Header, *bodies: bytes) -> bytes:
    """Encode a message: the length of a JSON header, the header with the lengths of the bodies, the bodies."""
    text = json.dumps([header, [len(body) for body in bodies]]).encode()
    return b"".join([struct.pack("I", len(text)), text, *bodies])


def send_message(control: int, header: Header, *bodies: bytes) -> None:
    """Write a message to a descriptor."""
    view = memoryview(pack_message(header, *bodies))
    while view:
        view = view[os.write(control, view) :]


def unpack_message(read: Callable[[int], bytes]) -> tuple[Header, list[bytes]]:
    """Read the next message.

    Args:
        read: returns at most the given number of bytes, none at the end.

    Raises:
        EOFError: the stream ended within the message.
    """

    def read_exactly(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = read(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError("the other side has ended")
            parts += part
        return bytes(parts)

    header, sizes = json.loads(read_exactly(struct.unpack("I", read_exactly(4))[0]))
    return header, [read_exactly(size) for size in sizes]
