"""Settings of sampling that a client asks for, where they hold."""

from __future__ import annotations

from typing import Any

from forge.types import Sampling

from .messages import BadRequest, ModelRequest

NAMES = {"temperature": "temperature", "top_p": "top_p", "topP": "top_p", "top_k": "top_k", "topK": "top_k"}


def client_sampling(request: ModelRequest) -> dict[str, Any]:
    """The fields of `Sampling` that a request has, in any dialect. BadRequest: an invalid value."""
    values: dict[str, Any] = {}
    for name, value in request.overridden.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in NAMES and not is_number:
            raise BadRequest(f"{name} must be a number", name)
        if name == "seed" and (type(value) is not int or not -(2**63) <= value < 2**63):
            raise BadRequest("seed must be a whole number of at most 64 bits", name)
        if name in NAMES or name == "seed":
            values[NAMES.get(name, name)] = value
    # Off is -1 for some clients; whole numbers come as floats in Google's.
    if "top_k" in values:
        values["top_k"] = max(int(values["top_k"]), 0)
    try:
        Sampling(**values)
    except (ValueError, OverflowError) as error:
        raise BadRequest(str(error)) from None
    return values
