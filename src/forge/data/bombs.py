"""Checks of tables that are small as files and enormous as rows (decompression bombs)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

MIN_ROW_BYTES = 1 << 30  # bytes of rows that any file may have, however small it is
RATIO = 200  # bytes of rows for one of the file; text is compressed to a fifth, rarely to a fiftieth
ROW = 64  # bytes that a row takes at least
MAX_READ = 1 << 28  # bytes of a file that is read for its size; of a larger one, what it says of itself is taken
BATCH_ROWS = 4096  # rows
RECORDS, DICTIONARY = 3, 2  # kinds of messages of Arrow
ROWS, COMPRESSION = 0, 3  # places of fields in a table of records


def check_parquet(path: Path) -> None:
    """Compare the rows of a Parquet file with its size, before they are made.

    Raises:
        ValueError: they would take far more; or the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    size = path.stat().st_size
    limit = max(MIN_ROW_BYTES, RATIO * size)
    try:
        # What the file states of itself, with at least ROW bytes a row.
        with parquet.ParquetFile(path) as file:
            metadata, columns = file.metadata, file.metadata.num_columns
            parts = [
                metadata.row_group(group).column(column)
                for group in range(metadata.num_row_groups)
                for column in range(columns)
            ]
            stated = max(sum(part.total_uncompressed_size for part in parts), ROW * metadata.num_rows)
            texts = sorted({part.path_in_schema for part in parts if part.physical_type == "BYTE_ARRAY"})
        if stated <= limit and size <= MAX_READ:
            stated = 0
            # A text that is repeated is stored once: as a dictionary it takes no memory until it is made a row.
            with parquet.ParquetFile(path, read_dictionary=texts) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    stated += ROW * len(batch) + sum(map(_size, batch.columns))
                    if stated > limit:
                        break
    except (pa.ArrowException, OSError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is not a parquet file: {' '.join(str(error).split())}") from error
    if stated > limit:
        raise ValueError(f"{path} has {size} bytes, and its rows would take more than {limit >> 30} GB: it is rejected")


def check_arrow(folder: Path) -> None:
    """Reject Arrow files, of a folder that `datasets` has written, with compressed buffers, which it never writes, or
    more rows than they have room for.

    Raises:
        ValueError: names the file.
    """
    import pyarrow as pa

    # Headers only: no column is read.
    for path in sorted(folder.rglob("*.arrow")):
        if not path.is_file():
            raise ValueError(f"{path} is not a regular file")
        rows = 0
        with pa.memory_map(str(path)) as source:
            try:
                for message in _messages(source):
                    batch_rows, compressed = _read_header(message)
                    rows += batch_rows
                    if compressed:
                        raise ValueError(f"{path} has compressed columns: write it without compression")
            except (struct.error, IndexError, pa.ArrowException, OSError) as error:
                raise ValueError(f"{path} is not an Arrow file: {' '.join(str(error).split())}") from error
        limit = max(MIN_ROW_BYTES, RATIO * path.stat().st_size)
        if rows * ROW > limit:
            raise ValueError(f"{path} says to have {rows} rows, which would take more than {limit >> 30} GB")


def _size(array: Any) -> int:
    """Bytes of an array whose dictionaries are written out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # A dictionary stores each value once; rows have it as often as it is used.
    if isinstance(array, pa.DictionaryArray):
        lengths: Any = pc.binary_length(array.dictionary)
        return int(pc.sum(pc.cast(lengths.take(array.indices), "int64")).as_py() or 0)
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray | pa.MapArray):
        size = array.keys.nbytes + _size(array.items) if isinstance(array, pa.MapArray) else _size(array.flatten())
        return int(size) + 8 * len(array)
    if isinstance(array, pa.StructArray):
        return sum(map(_size, array.flatten()))
    return int(array.nbytes)


def _messages(source: pyarrow.NativeFile) -> Iterator[pyarrow.Message]:
    import pyarrow as pa

    reader = pa.ipc.MessageReader.open_stream(source)
    try:
        while True:
            yield reader.read_next_message()
    except StopIteration:
        return


def _read_header(message: pyarrow.Message) -> tuple[int, bool]:
    """Rows of a message, and whether its columns are compressed: in pyarrow only the columns themselves say so."""
    data = bytes(message.metadata)
    root = _pointer(data, 0)
    kind = _field(data, root, 1)
    header = _field(data, root, 2)
    if not kind or not header or data[kind] not in (RECORDS, DICTIONARY):
        return 0, False
    table = _pointer(data, header)
    # The records of a dictionary are within its message.
    if data[kind] == DICTIONARY:
        inner = _field(data, table, 1)
        if not inner:
            return 0, False
        table = _pointer(data, inner)
    length = _field(data, table, ROWS)
    rows = struct.unpack_from("<q", data, length)[0] if length else 0
    return max(0, rows), bool(_field(data, table, COMPRESSION))


def _pointer(data: bytes, position: int) -> int:
    """The position that the offset at a position of a flatbuffer points to."""
    return position + int(struct.unpack_from("<I", data, position)[0])


def _field(data: bytes, table: int, index: int) -> int:
    """The position of a field in a table of a flatbuffer; 0: the table lacks it."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * index >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * index)
    return table + offset if offset else 0
