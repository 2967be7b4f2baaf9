"""Journals: append-only files of records that survive the process which writes them."""

import os
import pickle
import struct
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from ...system.files import room_for

# A record is a header and a pickled payload. The header has the payload's length and checksum, and a checksum of these
# two: otherwise a damaged length would look like a record that was not written to its end.
_FIELDS = struct.Struct("<QI")
_HEADER = struct.Struct("<QII")


class Journal:
    """A file of pickled records in the order they were appended; one process writes.

    A record survives the process once `append` returns, in the kernel's page cache. Nothing is fsynced, so a power cut
    may lose the last records. A process killed within `append` leaves a torn record, which the next writer truncates.

    Args:
        path: the file, created by the first `append` or `rewrite`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: FileIO | None = None
        self._end = 0

    @property
    def size(self) -> int:
        """Return the number of bytes of all complete records."""
        self._open_writable()
        return self._end

    def append(self, record: object) -> None:
        """Append one record; if that fails, the file is unchanged.

        Raises:
            NoRoom: the disk is full.
        """
        file = self._open_writable()
        try:
            self._end += _write_record(file, self.path, record)
        except OSError:
            # Records after a torn one would be unreadable.
            file.truncate(self._end)
            file.seek(self._end)
            raise

    def replay(self) -> Iterator[Any]:
        """Yield all complete records in their order. The file is only read, so that several processes may do so.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: a record is damaged; names the file and the record's offset.
        """
        with self.path.open("rb") as file:
            for payload, _ in self._complete_records(file):
                yield pickle.loads(payload)

    def rewrite(self, records: Iterable[Any]) -> None:
        """Replace all records by `records`: a killed process leaves the old file or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        file = FileIO(unfinished, "w+")
        try:
            end = sum(_write_record(file, self.path, record) for record in records)
        except BaseException:
            file.close()
            unfinished.unlink()
            raise

        os.replace(unfinished, self.path)
        if self._file is not None:
            self._file.close()
        self._file = file
        self._end = end

    def _open_writable(self) -> FileIO:
        if self._file is None:
            file = FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
            with self.path.open("rb") as reader:
                self._end = max((end for _, end in self._complete_records(reader)), default=0)
            # A torn record, which a killed process left after the last complete one, is cut off.
            file.truncate(self._end)
            file.seek(self._end)
            self._file = file
        return self._file

    def _complete_records(self, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
        """Yield (payload, offset of its end) for every complete record."""
        start = 0

        # A killed process leaves the first part of a record. So a record that is too short is torn, and ends the file;
        # a record with a wrong checksum is damaged, and an error.
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum, header_checksum = _HEADER.unpack(header)
            if crc32(header[: _FIELDS.size]) != header_checksum:
                raise ValueError(f"journal {self.path} is damaged: the record at byte {start} has no valid header")
            payload = file.read(length)
            if len(payload) < length:
                return
            if crc32(payload) != checksum:
                raise ValueError(f"journal {self.path} is damaged: the record at byte {start} fails its checksum")
            start += _HEADER.size + length
            yield payload, start


# Write one record at the position of `file`; return the number of bytes. `path` is named in errors.
def _write_record(file: FileIO, path: Path, record: object) -> int:
    payload = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
    fields = _FIELDS.pack(len(payload), crc32(payload))
    data = memoryview(fields + crc32(fields).to_bytes(4, "little") + payload)
    written = 0
    with room_for(path, len(data)):
        while written < len(data):  # an unbuffered write may write only a part
            written += file.write(data[written:]) or 0
    return written
