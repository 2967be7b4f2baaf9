"""Columns of rows as plain data, as text, and under the names that verl gives them."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from .files import Row, check_values


def with_ground_truth(row: Row) -> Row:
    """Return a row of verl's form with an additional column `ground_truth`; any other row unchanged.

    >>> with_ground_truth({"prompt": "2 + 2", "reward_model": {"ground_truth": "4"}})["ground_truth"]
    '4'
    """
    model = row.get("reward_model")
    if "ground_truth" in row or not isinstance(model, Mapping) or "ground_truth" not in model:
        return row
    return {**row, "ground_truth": model["ground_truth"]}


def plain_columns(row: Row, names: Sequence[str] | None, required: Sequence[str]) -> dict[str, Any]:
    """Return {name: value} of the columns that rewards get. Values that are not plain data, such as dates, are left
    out.

    Args:
        names: the columns to return, together with `required`; None: all columns.
        required: columns that must hold plain data.

    Raises:
        ValueError: a required column holds something else.
    """
    columns: dict[str, Any] = {}
    wanted = row if names is None else [name for name in dict.fromkeys((*names, *required)) if name in row]
    for name in wanted:
        try:
            columns[name] = plain_value(row[name])
        except ValueError as error:
            # A column that nothing requires may hold anything.
            if name in required:
                raise ValueError(f"column {name!r} {error}") from None
    return columns


def plain_value(value: object) -> Any:
    """Return a value as plain Python data: text, bytes, numbers, and lists and dicts of these. Arrays become lists.

    Raises:
        ValueError: it holds something else, such as a date.

    >>> plain_value({"a": [1, "x"]})
    {'a': [1, 'x']}
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if hasattr(value, "tolist"):  # an array, or a number of numpy
        return plain_value(value.tolist())
    raise ValueError(f"has a value of type {type(value).__name__}: rewards accept text, numbers, lists and mappings")


def read_text_field(row: Row, name: str) -> str:
    """Return the field `name` of a row as text. ValueError: it is missing, or neither text nor a finite number."""
    if name not in row:
        raise ValueError(f"no field {name!r}: the row has {', '.join(row)}")
    value = row[name]
    if not isinstance(value, str | Real | Decimal):
        fix = ": fill in the missing value, or remove the row" if value is None else ""
        raise ValueError(f"field {name!r} must be text or a number, not {type(value).__name__}{fix}")
    check_values(value if isinstance(value, str | int) else float(value), f"field {name!r}")
    return str(value)
