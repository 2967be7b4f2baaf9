"""The table of torchforge's names says what importing each gives."""

import sys
from pathlib import Path

import pytest

from .suites import TORCHFORGE

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
import describe_names


def test_torchforge_names_match_status_in_compatibility_table():
    rows = describe_names.read_table()
    assert {row["status"] for row in rows} == {"works", "differs", "raises"}
    said = [(row["status"], row["here"]) for row in rows]
    assert [describe_names.status_of(row["module"], row["name"], row["methods"]) for row in rows] == said


@pytest.mark.processes
@pytest.mark.skipif(not TORCHFORGE.source, reason="no checkout of torchforge")
def test_compatibility_table_has_every_public_torchforge_name():
    rows = describe_names.rows_of_checkout(Path(TORCHFORGE.source))
    assert rows == [tuple(row.values()) for row in describe_names.read_table()]
