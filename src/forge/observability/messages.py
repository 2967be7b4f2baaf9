"""The messages of an Arrow IPC stream that somebody else may have written, before Arrow reads them: Arrow allocates
whatever size a compressed buffer states.

The layout of a message is that of Arrow's columnar format; its header is a FlatBuffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

LARGEST_HEADER = 1 << 20  # bytes
LARGEST, UNPACKED = 1 << 30, 1 << 31  # bytes of a message, and of its buffers without compression
MOST_ROWS = 1 << 24  # of a message
SCHEMA, BATCH = 1, 3  # kinds


class Message(NamedTuple):
    """Where a message is in the file; `rows` of a record batch."""

    start: int
    body: int
    end: int
    kind: int
    rows: int
    buffers: tuple[tuple[int, int], ...]  # offset in the body, and length
    compressed: bool


def messages(file: BinaryIO, start: int = 0) -> Iterator[Message]:
    """The messages from a byte on, as far as they are whole.

    Raises:
        ValueError: one is damaged, or too large.
    """
    size = file.seek(0, 2)
    while True:
        file.seek(start)
        prefix = file.read(8)
        if len(prefix) < 8:
            return
        mark, length = struct.unpack("<Ii", prefix)
        if mark != 0xFFFFFFFF or length == 0:  # the end of a stream
            return
        if not 0 < length <= LARGEST_HEADER:
            raise ValueError(f"the header of a message has {length} bytes")
        header = file.read(length)
        if len(header) < length:
            return
        try:
            message = _message(header, start, start + 8 + length)
        except (struct.error, IndexError) as error:
            raise ValueError(f"the header of a message is damaged: {error}") from None
        if message.end > size:
            return
        yield message
        start = message.end


def read(file: BinaryIO, message: Message) -> bytes:
    """A message. ValueError: its buffers are outside of it, or would be too large."""
    file.seek(message.start)
    content = file.read(message.end - message.start)
    first, unpacked = message.body - message.start, 0
    for offset, length in message.buffers:
        if not (offset >= 0 and length >= 0 and first + offset + length <= len(content)):
            raise ValueError("a buffer is outside of its message")
        size = length
        if message.compressed and length >= 8:
            (stated,) = struct.unpack_from("<q", content, first + offset)
            size = length if stated == -1 else stated
        if size < 0 or (unpacked := unpacked + size) > UNPACKED:
            raise ValueError(f"a step has more than {UNPACKED >> 20} MiB")
    return content


def _message(header: bytes, start: int, body: int) -> Message:
    table = _Table(header, struct.unpack_from("<I", header)[0])
    kind, length = table.number(1, "<B"), table.number(3, "<q")
    if not 0 <= length <= LARGEST:
        raise ValueError(f"a message has {length} bytes")
    end = body + length
    if kind != BATCH:
        return Message(start, body, end, kind, 0, (), False)
    batch = table.table(2)
    rows = batch.number(0, "<q")
    if not 0 <= rows <= MOST_ROWS:
        raise ValueError(f"a step has {rows} rows")
    return Message(start, body, end, kind, rows, batch.pairs(2), batch.has(3))


class _Table:
    """A table of a FlatBuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.fields = at - struct.unpack_from("<i", data, at)[0]
        if self.fields < 0:
            raise IndexError("a table is outside of it")
        self.size = struct.unpack_from("<H", data, self.fields)[0]

    def _place(self, field: int) -> int:
        """Where the value of a field is; 0: it has none."""
        slot = 4 + 2 * field
        offset = struct.unpack_from("<H", self.data, self.fields + slot)[0] if slot < self.size else 0
        return self.at + offset if offset else 0

    def has(self, field: int) -> bool:
        return self._place(field) != 0

    def number(self, field: int, form: str) -> int:
        place = self._place(field)
        return int(struct.unpack_from(form, self.data, place)[0]) if place else 0

    def table(self, field: int) -> _Table:
        place = self._place(field)
        if not place:
            raise IndexError("a part is missing")
        return _Table(self.data, place + struct.unpack_from("<I", self.data, place)[0])

    def pairs(self, field: int) -> tuple[tuple[int, int], ...]:
        """A list of pairs of whole numbers of 64 bits."""
        place = self._place(field)
        if not place:
            return ()
        place += struct.unpack_from("<I", self.data, place)[0]
        (count,) = struct.unpack_from("<I", self.data, place)
        if 16 * count > len(self.data):
            raise IndexError("a list is too long")
        flat = struct.unpack_from(f"<{2 * count}q", self.data, place + 4)
        return tuple(zip(flat[::2], flat[1::2], strict=True))
