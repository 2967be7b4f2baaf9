"""How reward functions are called: each parameter gets what it names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Literal

from ..types import Completion, Prompt

Message = Mapping[str, Any]
# Of one response; all but the first three are of the prompt, too.
OF_A_RESPONSE = ("response", "completion", "messages", "prompt", "target")
# Of a prompt and all of its responses.
OF_A_GROUP = ("responses", "completions", "messages", "prompt", "target", "conversational")
KNOWN = "prompt, response, target, completion, messages, or columns of the rows (responses: all of a prompt at once)"
Form = Literal["positional", "response", "group"]


class MissingColumn(ValueError):
    """A reward names a column that the row of a prompt lacks."""


@dataclass(frozen=True)
class Answers:
    """The responses to one prompt, with everything that a reward may name.

    Args:
        row: the columns of the prompt's row.
        messages: of the prompt, where it is a conversation.
        conversational: the row had the conversation itself, a list of messages.
        completions: with the tokens of each response; without them they have the texts alone.
    """

    prompt: str
    responses: Sequence[str]
    target: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    conversational: bool = False
    completions: Sequence[Completion] = ()

    @classmethod
    def of(
        cls,
        prompt: object,
        responses: Sequence[str],
        target: str | None = None,
        completions: Sequence[Completion] | None = None,
    ) -> Answers:
        """The answers to a `Prompt`, which has its row, or to a text."""
        completions = completions or [Completion(text) for text in responses]
        if not isinstance(prompt, Prompt):
            return cls(str(prompt), responses, target, completions=completions)
        messages = list(prompt.messages)
        return cls(prompt.text, responses, target, prompt.row, messages, prompt.conversational, completions)

    def conversation(self, number: int) -> list[Message]:
        """The messages of the prompt and of a response."""
        messages = self.messages or [{"role": "user", "content": self.prompt}]
        return [*messages, {"role": "assistant", "content": self.responses[number]}]


class RewardCall:
    """What each parameter of a reward function stands for.

    A function of one response names `response` or `completion`, one of a group `responses`; all other names are of the
    prompt, or columns of its row. One that names none of these takes prompt, response and target by position.

    Attributes:
        form: which of these it is.
        columns: names of columns that it requires.
        optional: names of columns that it takes where a row has them.
        takes_all: it takes all columns, by **kwargs.

    Raises:
        ValueError: the function takes other arguments.
    """

    def __init__(self, function: Any, name: str, group: bool = False) -> None:
        self.name = name
        self.form: Form = "positional"
        self.columns: tuple[str, ...] = ()
        self.optional: tuple[str, ...] = ()
        self.takes_all = False
        self.names: frozenset[str] = frozenset()
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of a function in C
            return
        # Collections of arguments name nothing by themselves.
        parameters = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.form = _form(parameters, group)
        if self.form == "positional":
            try:
                # The arguments are tried without a call, so that a wrong function is an error before the run.
                signature.bind("", "", "")
            except TypeError:
                remedy = f"name its parameters {KNOWN}"
                raise ValueError(f"the reward {name}{signature} names nothing of a response: {remedy}") from None
            return
        known = OF_A_GROUP if self.form == "group" else OF_A_RESPONSE
        # What is neither of the response nor of the prompt is a column.
        self.names = frozenset(p.name for p in parameters)
        self.columns = tuple(p.name for p in parameters if p.name not in known and p.default is p.empty)
        self.optional = tuple(p.name for p in parameters if p.name not in known and p.default is not p.empty)
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    @property
    def needs_target(self) -> bool:
        """Whether it takes the target."""
        return self.form == "positional" or "target" in self.names

    @property
    def reads_tokens(self) -> bool:
        """Whether it takes more of a completion than its text."""
        return bool({"completion", "completions"} & self.names)

    def arguments(self, answers: Answers, number: int | None = None) -> dict[str, Any]:
        """The arguments for one response, or for all of them. MissingColumn: the row lacks one."""
        values: dict[str, Any] = {"prompt": answers.prompt, "target": answers.target}
        if number is None:
            values["responses"] = list(answers.responses)
            values["completions"] = list(answers.completions)
            values["messages"] = [answers.conversation(number) for number in range(len(answers.responses))]
            values["conversational"] = answers.conversational
        else:
            values["response"], values["completion"] = answers.responses[number], None
            if "completion" in self.names:
                values["completion"] = answers.completions[number]
            values["messages"] = answers.conversation(number)
        for name in self.columns:
            if name not in answers.row:
                columns = ", ".join(answers.row) or "none"
                raise MissingColumn(f"the reward {self.name} names {name!r}, and the prompt's row has {columns}")
        row = {
            name: value
            for name, value in answers.row.items()
            if name not in values and (self.takes_all or name in self.columns or name in self.optional)
        }
        return row | {name: value for name, value in values.items() if name in self.names}


def _form(parameters: Sequence[inspect.Parameter], group: bool) -> Form:
    """How a function with these parameters is called; `group`: it is the method of an object that scores groups."""
    names = {p.name for p in parameters}
    by_position = any(p.kind is p.POSITIONAL_ONLY for p in parameters)
    # `_` and `_prompt` are names for what a function does not use, which no column has.
    if by_position or any(p.name.startswith("_") and p.default is p.empty for p in parameters):
        return "positional"
    if "responses" in names:
        return "group"
    if group:
        return "positional"
    return "response" if {"response", "completion"} & names else "positional"


@lru_cache(maxsize=1)
def _adapters() -> tuple[Any, ...]:
    return tuple(point.load() for point in entry_points(group="forge.reward_forms"))


def adapted(function: Any) -> Any:
    """The function, or one of ours in its place where an extension knows another library's form of it."""
    found = (adapter(function) for adapter in _adapters())
    return next((ours for ours in found if ours is not None), function)


def columns_of(calls: Sequence[RewardCall]) -> list[str] | None:
    """The columns that these functions take, required ones first; None: all."""
    if any(call.takes_all for call in calls):
        return None
    return list(dict.fromkeys(name for call in calls for name in (*call.columns, *call.optional)))
