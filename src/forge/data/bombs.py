"""Tables from elsewhere that are small as files and enormous as rows."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

LEAST = 1 << 30  # bytes of rows that any file may have
RATIO = 200  # bytes of rows for one of the file; text is compressed to a fifth, rarely to a fiftieth
ROW = 64  # bytes that a row takes at least
WHOLE = 1 << 28  # bytes of a file that is read for its size; of a larger one, what it says of itself is taken
AT_ONCE = 4096  # rows
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
    most = max(LEAST, RATIO * size)
    try:
        with parquet.ParquetFile(path) as file:
            about, columns = file.metadata, file.metadata.num_columns
            parts = [
                about.row_group(group).column(column)
                for group in range(about.num_row_groups)
                for column in range(columns)
            ]
            stated = max(sum(part.total_uncompressed_size for part in parts), ROW * about.num_rows)
            texts = sorted({part.path_in_schema for part in parts if part.physical_type == "BYTE_ARRAY"})
        if stated <= most and size <= WHOLE:
            stated = 0
            # A text that is repeated is stored once: as a dictionary it takes no memory until it is made a row.
            with parquet.ParquetFile(path, read_dictionary=texts) as file:
                for batch in file.iter_batches(AT_ONCE):
                    stated += ROW * len(batch) + sum(map(_size, batch.columns))
                    if stated > most:
                        break
    except (pa.ArrowException, OSError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is not a parquet file: {' '.join(str(error).split())}") from error
    if stated > most:
        raise ValueError(f"{path} has {size} bytes, and its rows would take more than {most >> 30} GB: it is rejected")


def check_arrow(folder: Path) -> None:
    """Reject Arrow files, of a folder that `datasets` has written, with compressed buffers, which it never writes, or
    more rows than they have room for.

    Raises:
        ValueError: names the file.
    """
    import pyarrow as pa

    for path in sorted(folder.rglob("*.arrow")):
        if not path.is_file():
            raise ValueError(f"{path} is no regular file")
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
        most = max(LEAST, RATIO * path.stat().st_size)
        if rows * ROW > most:
            raise ValueError(f"{path} says to have {rows} rows, which would take more than {most >> 30} GB")


def _size(array: Any) -> int:
    """Bytes of an array whose dictionaries are written out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.DictionaryArray):
        lengths: Any = pc.binary_length(array.dictionary)
        return int(pc.sum(pc.cast(lengths.take(array.indices), "int64")).as_py() or 0)
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray | pa.MapArray):
        inner = array.keys.nbytes + _size(array.items) if isinstance(array, pa.MapArray) else _size(array.flatten())
        return int(inner) + 8 * len(array)
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
    if data[kind] == DICTIONARY:
        inner = _field(data, table, 1)
        if not inner:
            return 0, False
        table = _pointer(data, inner)
    length = _field(data, table, ROWS)
    rows = struct.unpack_from("<q", data, length)[0] if length else 0
    return max(0, rows), bool(_field(data, table, COMPRESSION))


def _pointer(data: bytes, at: int) -> int:
    """Where the offset at a place of a flatbuffer leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, index: int) -> int:
    """Where a table of a flatbuffer has a field; 0: nowhere."""
    places = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, places)
    if 4 + 2 * index >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, places + 4 + 2 * index)
    return table + offset if offset else 0
