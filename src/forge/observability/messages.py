"""Messages of an Arrow IPC stream of another user, checked before Arrow reads them: Arrow allocates whatever size a
compressed buffer states.

The layout of a message is that of Arrow's columnar format; its header is a FlatBuffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

# Limits of what a file makes its reader allocate; those of real runs are far below.
MAX_HEADER = 1 << 20  # bytes
MAX_MESSAGE = 1 << 30  # bytes
MAX_UNPACKED = 1 << 31  # bytes of the buffers of a message without compression
MAX_ROWS = 1 << 24  # of a message
SCHEMA = 1  # kinds of messages
BATCH = 3


class Message(NamedTuple):
    """The position of a message in the file; `rows` is that of a record batch."""

    start: int
    body: int
    end: int
    kind: int
    rows: int
    buffers: tuple[tuple[int, int], ...]  # offset in the body, and length
    compressed: bool


def messages(file: BinaryIO, start: int = 0) -> Iterator[Message]:
    """Yield the complete messages from a byte on.

    Raises:
        ValueError: a message is damaged, or too large.
    """
    size = file.seek(0, 2)
    while True:
        file.seek(start)
        prefix = file.read(8)
        # The file grows while it is read: an incomplete message is the end for now.
        if len(prefix) < 8:
            return
        mark, length = struct.unpack("<Ii", prefix)
        if mark != 0xFFFFFFFF or length == 0:  # the end of a stream
            return
        if not 0 < length <= MAX_HEADER:
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
    """Read a message. ValueError: its buffers are outside of it, or would be too large."""
    file.seek(message.start)
    content = file.read(message.end - message.start)
    first = message.body - message.start
    unpacked = 0
    for offset, length in message.buffers:
        if not (offset >= 0 and length >= 0 and first + offset + length <= len(content)):
            raise ValueError("a buffer is outside of its message")
        size = length
        # A compressed buffer begins with its size; -1 marks one that did not get smaller and is stored as it is.
        if message.compressed and length >= 8:
            (stated,) = struct.unpack_from("<q", content, first + offset)
            size = length if stated == -1 else stated
        unpacked += max(size, 0)
        if size < 0 or unpacked > MAX_UNPACKED:
            raise ValueError(f"a step has more than {MAX_UNPACKED >> 20} MiB")
    return content


def _message(header: bytes, start: int, body: int) -> Message:
    table = _Table(header, struct.unpack_from("<I", header)[0])
    kind = table.number(1, "<B")
    length = table.number(3, "<q")
    if not 0 <= length <= MAX_MESSAGE:
        raise ValueError(f"a message has {length} bytes")
    end = body + length
    # Other messages, such as the schema, have no rows.
    if kind != BATCH:
        return Message(start, body, end, kind, 0, (), False)
    batch = table.table(2)
    rows = batch.number(0, "<q")
    if not 0 <= rows <= MAX_ROWS:
        raise ValueError(f"a step has {rows} rows")
    return Message(start, body, end, kind, rows, batch.pairs(2), batch.has(3))


class _Table:
    """A table of a FlatBuffer."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.start = start
        # A table begins with the distance back to its list of fields, which holds their offsets.
        self.fields = start - struct.unpack_from("<i", data, start)[0]
        if self.fields < 0:
            raise IndexError("a table is outside of it")
        self.size = struct.unpack_from("<H", data, self.fields)[0]

    def _offset(self, field: int) -> int:
        """Return the offset of a field's value; 0 if it has none."""
        slot = 4 + 2 * field
        offset = struct.unpack_from("<H", self.data, self.fields + slot)[0] if slot < self.size else 0
        return self.start + offset if offset else 0

    def has(self, field: int) -> bool:
        return self._offset(field) != 0

    def number(self, field: int, form: str) -> int:
        offset = self._offset(field)
        return int(struct.unpack_from(form, self.data, offset)[0]) if offset else 0

    def table(self, field: int) -> _Table:
        offset = self._offset(field)
        if not offset:
            raise IndexError("a part is missing")
        return _Table(self.data, offset + struct.unpack_from("<I", self.data, offset)[0])

    def pairs(self, field: int) -> tuple[tuple[int, int], ...]:
        """Return a list of pairs of 64-bit integers."""
        offset = self._offset(field)
        if not offset:
            return ()
        offset += struct.unpack_from("<I", self.data, offset)[0]
        (count,) = struct.unpack_from("<I", self.data, offset)
        if 16 * count > len(self.data):
            raise IndexError("a list is too long")
        flat = struct.unpack_from(f"<{2 * count}q", self.data, offset + 4)
        return tuple(zip(flat[::2], flat[1::2], strict=True))
