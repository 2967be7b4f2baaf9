"""Settings of sampling that a client asks for, where they hold."""

from __future__ import annotations

from typing import Any

from forge.data.special_tokens import spelled
from forge.types import Completion, Sampling
from forge_envs.dialogue import Dialogue

from .messages import BadRequest, ModelRequest, TokenLogprob

NUMBERS = ("temperature", "top_p", "top_k", "seed")


def client_sampling(request: ModelRequest) -> dict[str, Any]:
    """The fields of `Sampling` that a request has, in any dialect. BadRequest: an invalid value."""
    values = {name: value for name, value in request.overridden.items() if name in NUMBERS}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"{name} must be a number", name)
    try:
        # Off is -1 for some clients.
        values |= {"top_k": max(int(values["top_k"]), 0)} if "top_k" in values else {}
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
