"""The table of torchforge's names says what importing each gives."""

from __future__ import annotations

import pytest

from .names import read_table, rows_of_checkout, status_of
from .suites import TORCHFORGE


def test_names_of_torchforge_are_what_table_says():
    rows = read_table()
    assert len(rows) > 200
    assert {row["status"] for row in rows} == {"works", "differs", "raises"}
    said = [(row["status"], row["here"]) for row in rows]
    assert [status_of(row["module"], row["name"], row["methods"]) for row in rows] == said


@pytest.mark.processes
@pytest.mark.skipif(not TORCHFORGE.source, reason="no checkout of torchforge")
def test_table_has_every_public_name():
    assert rows_of_checkout() == [tuple(row.values()) for row in read_table()]
