"""Settings of sampling that a client asks for, where they hold."""

from __future__ import annotations

from typing import Any

from forge.data.spelling import spelled
from forge.types import Completion, Sampling
from forge_envs.dialogue import Dialogue

from .messages import BadRequest, ModelRequest, TokenLogprob

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


def choose_grammar(request: ModelRequest, dialogue: Dialogue) -> str:
    """The grammar of the turn; "" for any text. BadRequest: there is none for what the client asks."""
    if request.schema is None and request.tool_choice in ("auto", "none"):
        return ""
    from forge_agents.grammar import calls_grammar, json_grammar

    field = "response_format" if request.schema is not None else "tool_choice"
    try:
        if request.schema is not None:
            return json_grammar(request.schema)
        choice = request.tool_choice.removeprefix("function:")
        added = dialogue.tokenizer.get_added_vocab()
        return calls_grammar(dialogue.syntax, request.tools, choice, request.parallel_calls, added)
    except ValueError as error:
        raise BadRequest(str(error), field) from None


def read_logprobs(request: ModelRequest, turn: Completion, tokenizer: Any) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities that a request asks for."""
    if request.logprobs is None:
        return ()
    names = [spelled(tokenizer, token)[0] for token in turn.token_ids]
    tops = turn.top_logprobs or [{} for _ in names]
    return tuple(
        TokenLogprob(name, logprob, tuple((spelled(tokenizer, other)[0], value) for other, value in top.items()))
        for name, logprob, top in zip(names, turn.logprobs, tops, strict=True)
    )
