"""Tables that are small as files: what their rows would take is known before they are made."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from forge.data.files import open_rows, open_stream

pa = pytest.importorskip("pyarrow")
pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")
LONG = "x" * (1 << 20)


def repeated(text: str, rows: int) -> Any:
    """A column of one text, without the memory that its rows would take."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def in_lists(text: str, rows: int) -> Any:
    return pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), repeated(text, rows))


BOMBS = {
    "text": lambda: {"question": repeated(LONG, 100_000)},
    "lists": lambda: {"question": in_lists(LONG, 100_000)},
    "structs": lambda: {"a": pa.StructArray.from_arrays([repeated(LONG, 100_000)], ["b"])},
    "nulls": lambda: {"question": pa.nulls(30_000_000)},
    "zeros": lambda: {"question": pa.nulls(30_000_000, pa.int8()).fill_null(0)},
}


@pytest.mark.parametrize("make", BOMBS.values(), ids=BOMBS.keys())
def test_a_parquet_file_whose_rows_would_fill_the_memory_is_one_line(make: Any, tmp_path: Path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table(make()), path, compression="zstd")
    assert path.stat().st_size < 5 << 20
    for read in (lambda: open_rows(str(path), split="train"), lambda: open_rows(str(tmp_path), split="train")):
        with pytest.raises(ValueError, match=r"\A[^\n]*rows.parquet has [^\n]*rejected\Z"):
            read()
    with pytest.raises(ValueError, match=r"\A[^\n]*rejected\Z"):
        open_stream(str(path), split="train")


def test_a_page_that_is_unpacked_to_gigabytes_is_one_line(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    whole = pa.table({"question": pa.array([LONG + str(number) for number in range(300)])})
    with parquet.ParquetWriter(path, whole.schema, compression="zstd", use_dictionary=False) as writer:
        for _ in range(5):
            writer.write_table(whole)
    assert path.stat().st_size < 2 << 20
    with pytest.raises(ValueError, match=r"\A[^\n]*rejected\Z"):
        open_rows(str(path), split="train")


@pytest.mark.parametrize("keep", [0, 4, 50, 0.5, 0.99])
def test_a_parquet_file_that_is_cut_is_one_line(keep: float, tmp_path: Path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"question": [f"question {n}" for n in range(2000)]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ValueError, match=r"\A[^\n]*is not a parquet file[^\n]*\Z"):
        open_rows(str(path), split="train")


def test_rows_that_repeat_are_read(tmp_path: Path):
    rows = [
        {"question": "x" * 2000, "answer": str(number % 3), "tags": ["a", None, "b"], "more": {"c": number, "d": None}}
        for number in range(3000)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", compression="zstd")
    read = open_rows(str(tmp_path / "rows.parquet"), split="train")
    assert read[2999] == {"question": "x" * 2000, "answer": "2", "tags": ["a", None, "b"], "more": {"c": 2999}}
    assert len(read) == 3000
    assert next(iter(open_stream(str(tmp_path / "rows.parquet"), split="train")))["answer"] == "0"


def saved(folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list([{"question": "a" * 100}] * 50).save_to_disk(str(folder))
    (path,) = folder.glob("*.arrow")
    return path


def test_a_folder_that_datasets_wrote_is_read(tmp_path: Path):
    saved(tmp_path)
    assert open_rows(str(tmp_path), split="train")[0] == {"question": "a" * 100}


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_an_arrow_file_with_compressed_columns_is_one_line(codec: str, tmp_path: Path):
    path = saved(tmp_path)
    table = pa.table({"question": [LONG] * 50})
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"\A[^\n]*arrow has compressed columns[^\n]*\Z"):
        open_rows(str(tmp_path), split="train")


def test_an_arrow_file_of_more_rows_than_it_has_is_one_line(tmp_path: Path):
    path = saved(tmp_path)
    table = pa.table({"question": pa.nulls(1 << 30)})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"\A[^\n]*arrow says to have 1073741824 rows[^\n]*\Z"):
        open_rows(str(tmp_path), split="train")


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_a_damaged_arrow_file_is_one_line_or_is_read(place: int, tmp_path: Path):
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    content[place : place + 4] = struct.pack("<i", -2)
    path.write_bytes(content)
    try:
        said = str(open_rows(str(tmp_path), split="train")[:0])
    except ValueError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n"),
        ("rows.jsonl", '{"a": 1}\n{"a": ' + "1" * 5000 + "}\n"),
        ("rows.json", "[" * 100_000),
        ("rows.json", '[{"a": ' + "1" * 5000 + "}]"),
    ],
    ids=range(4),
)
def test_a_table_of_json_that_is_too_deep_or_has_a_number_of_thousands_of_digits_is_one_line(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"\A[^\n]*{name}[^\n]*\Z") as caught:
        open_rows(str(tmp_path / name), split="train")
    assert ("line 2" in str(caught.value)) == (name == "rows.jsonl")
    assert not isinstance(caught.value, json.JSONDecodeError)
