"""Use reward functions of TRL and verl unchanged: `forge.rewards` finds `adapted` by an entry point.

A function of TRL has a parameter `completions` or `completion_ids`. Its arguments are lists over a batch, which here is
the group of a prompt, and it returns None for samples that it does not apply to. A function of verl has a parameter
`solution_str`, and may return a mapping with the score.
"""

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from forge.observability import record_metric
from forge.types import Completion

# Parameters of TRL's functions that are not columns of the data.
OWN = ("completions", "completion_ids", "prompts", "prompt", "target", "log_metric", "log_extra")
# Arguments that `forge.rewards` passes to a function of a group, from which TRL's are made.
GROUP = ("responses", "completions", "messages", "prompt", "target", "conversational")


def adapted(function: Any) -> Callable[..., Any] | None:
    """Adapt a reward function of TRL or verl to this library; return None if it is neither.

    Raises:
        ValueError: it needs the state of TRL's trainer.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return None
    if "solution_str" in signature.parameters:
        return _of_verl(function, signature)
    if {"completions", "completion_ids"} & signature.parameters.keys() and "responses" not in signature.parameters:
        return _of_trl(function, signature)
    return None


def _of_verl(function: Any, signature: Signature) -> Callable[..., Any]:
    # The parameters tell `forge.rewards` which columns to pass; **kwargs must come last.
    renamed = {"solution_str": "response"}
    parameters = [
        p.replace(name=renamed.get(p.name, p.name), kind=_keyword_kind(p)) for p in signature.parameters.values()
    ]
    return _copy_name(
        lambda response, **columns: function(solution_str=response, **columns),
        function,
        sorted(parameters, key=lambda p: p.kind),
    )


def _of_trl(function: Any, signature: Signature) -> Callable[..., Any]:
    names = signature.parameters
    if "trainer_state" in names:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"the reward {name} has the parameter trainer_state, which only TRL provides: remove it")
    # TRL passes these to every function: one with **kwargs gets them without naming them.
    takes_all = any(p.kind is p.VAR_KEYWORD for p in names.values())
    always = {"prompts", "completions", "completion_ids"} if takes_all else set()

    def score_trl(
        responses: Sequence[str],
        completions: Sequence[Completion],
        messages: Sequence[Sequence[Any]],
        prompt: str,
        target: str | None,
        conversational: bool,
        **columns: Any,
    ) -> Any:
        count = len(responses)
        # As in TRL, prompts and completions are messages if the data set has messages, else texts.
        prompts = [list(conversation[:-1]) if conversational else prompt for conversation in messages]
        values: dict[str, Any] = {
            "prompts": prompts,
            "prompt": prompts,
            "completions": [list(conversation[-1:]) for conversation in messages] if conversational else [*responses],
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "target": [target] * count,
            "log_metric": record_metric,
            "log_extra": lambda *_: None,
        }
        own = {name: value for name, value in values.items() if name in names or name in always}
        return function(**{name: [value] * count for name, value in columns.items() if name not in values}, **own)

    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in GROUP]
    columns = [p for p in names.values() if p.name not in OWN and p.kind is not p.VAR_POSITIONAL]
    parameters += sorted((p.replace(kind=_keyword_kind(p)) for p in columns), key=lambda p: p.kind)
    wrapped = _copy_name(score_trl, function, parameters)
    wrapped.may_abstain = True  # type: ignore[attr-defined]

    return wrapped


def _keyword_kind(parameter: Parameter) -> Any:
    return parameter.kind if parameter.kind is parameter.VAR_KEYWORD else parameter.KEYWORD_ONLY


def _copy_name(scored: Callable[..., Any], function: Any, parameters: Sequence[Parameter]) -> Callable[..., Any]:
    """Return `scored` with the name of a function and these parameters, as a coroutine function if that is one."""
    wrapped: Any = scored
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        async def score_later(**arguments: Any) -> Any:
            return await scored(**arguments)

        wrapped = score_later
    wrapped.__name__ = getattr(function, "__name__", type(function).__name__)
    wrapped.__signature__ = Signature(parameters)
    return wrapped
