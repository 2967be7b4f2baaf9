"""How reward functions are called: each parameter gets what it names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..observability import record_metric
from ..types import Completion, Prompt

Message = Mapping[str, Any]
# Of one response; all but the first three are of the prompt, too.
OF_A_RESPONSE = ("response", "solution_str", "completion", "messages", "prompt", "target")  # `solution_str` is verl's
# Of a prompt and all of its responses.
OF_A_GROUP = ("responses", "completions", "messages", "prompt", "target")
# TRL's, lists over a batch, which here is the group.
OF_A_BATCH = ("completions", "completion_ids", "prompts", "prompt", "target", "log_metric", "log_extra")
KNOWN = "prompt, response, target, completion, messages, or columns of the rows (responses: all of a prompt at once)"
Form = Literal["positional", "response", "group", "batch"]


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
    prompt, or columns of its row. A function of TRL's form names `completions` or `completion_ids`: all of its
    arguments are lists. One that names none of these takes prompt, response and target by position.

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
        known: tuple[str, ...] = {"response": OF_A_RESPONSE, "group": OF_A_GROUP, "batch": OF_A_BATCH}[self.form]
        if self.form == "batch" and any(p.name == "trainer_state" for p in parameters):
            raise ValueError(f"the reward {name} takes trainer_state, which is TRL's own: leave that parameter out")
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
        return bool({"completion", "completion_ids"} & self.names) or (
            self.form == "group" and "completions" in self.names
        )

    def arguments(self, answers: Answers, number: int) -> dict[str, Any]:
        """The arguments for one response. MissingColumn: the row lacks one."""
        values: dict[str, Any] = {
            "prompt": answers.prompt,
            "response": answers.responses[number],
            "solution_str": answers.responses[number],
            "target": answers.target,
        }
        if "completion" in self.names:
            values["completion"] = answers.completions[number]
        if "messages" in self.names:
            values["messages"] = answers.conversation(number)
        return self._named(values, self._row(answers))

    def group_arguments(self, answers: Answers) -> dict[str, Any]:
        """The arguments for all responses of a prompt. MissingColumn: the row lacks one."""
        count = len(answers.responses)
        row = self._row(answers)
        if self.form == "group":
            values: dict[str, Any] = {
                "prompt": answers.prompt,
                "target": answers.target,
                "responses": list(answers.responses),
                "completions": list(answers.completions),
            }
            if "messages" in self.names:
                values["messages"] = [answers.conversation(number) for number in range(count)]
            return self._named(values, row)
        # TRL gives what the data set had: messages for messages, text for text.
        prompt: Any = list(answers.messages) if answers.conversational else answers.prompt
        texts: list[Any] = list(answers.responses)
        if answers.conversational:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        values = {
            "prompts": [prompt] * count,
            "prompt": [prompt] * count,
            "completions": texts,
            "completion_ids": [list(completion.token_ids) for completion in answers.completions],
            "target": [answers.target] * count,
            "log_metric": record_metric,
            "log_extra": lambda *_: None,
        }
        # TRL's functions are always given these, and often collect them in **kwargs.
        collected = {"prompts", "completions", "completion_ids"} if self.takes_all else set()
        return self._named(values, {name: [value] * count for name, value in row.items()}, collected)

    def _row(self, answers: Answers) -> dict[str, Any]:
        """The columns that the function takes, by name."""
        for name in self.columns:
            if name not in answers.row:
                columns = ", ".join(answers.row) or "none"
                raise MissingColumn(f"the reward {self.name} names {name!r}, and the prompt's row has {columns}")
        if self.takes_all:
            return dict(answers.row)
        return {name: answers.row[name] for name in (*self.columns, *self.optional) if name in answers.row}

    def _named(self, values: dict[str, Any], row: dict[str, Any], given: set[str] | None = None) -> dict[str, Any]:
        """The values that the function names, and the columns that are none of them."""
        named = {name: value for name, value in values.items() if name in self.names | (given or set())}
        return {name: value for name, value in row.items() if name not in values} | named


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
    if {"completions", "completion_ids"} & names:
        return "batch"
    return "response" if {"response", "solution_str", "completion"} & names else "positional"


def columns_of(calls: Sequence[RewardCall]) -> list[str] | None:
    """The columns that these functions take, required ones first; None: all."""
    if any(call.takes_all for call in calls):
        return None
    return list(dict.fromkeys(name for call in calls for name in (*call.columns, *call.optional)))
