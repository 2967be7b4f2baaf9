"""How reward functions are called: each parameter gets what it names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from ..types import Completion, Prompt

Message = Mapping[str, Any]
# Of one response; all but the first three are of the prompt, too.
OF_A_RESPONSE = ("response", "completion", "messages", "prompt", "target")
# Of a prompt and all of its responses.
OF_A_GROUP = ("responses", "completions", "messages", "prompt", "target", "conversational")
KNOWN = "prompt, response, target, completion, messages, or columns of the rows (responses: all of a prompt at once)"


class MissingColumn(ValueError):
    """A reward names a column that the row of a prompt lacks."""


@dataclass(frozen=True)
class Answers:
    """The responses to one prompt, with everything that a reward may name.

    Args:
        row: the columns of the prompt's row.
        messages: of the prompt, where it is a conversation.
        conversational: the row had the conversation itself, a list of messages.
        completions: with the tokens of each response; without them they have the texts only.
    """

    prompt: str
    responses: Sequence[str]
    target: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    conversational: bool = False
    completions: Sequence[Completion] = ()

    @classmethod
    def from_texts(
        cls,
        prompt: object,
        responses: Sequence[str],
        target: str | None = None,
        completions: Sequence[Completion] | None = None,
    ) -> Answers:
        """Return the answers to a `Prompt`, which has its row, or to a text."""
        completions = completions or [Completion(text) for text in responses]
        if not isinstance(prompt, Prompt):
            return cls(str(prompt), responses, target, completions=completions)
        messages = list(prompt.messages)
        return cls(prompt.text, responses, target, prompt.row, messages, prompt.conversational, completions)

    def conversation(self, number: int) -> list[Message]:
        """Return the messages of the prompt and of a response."""
        messages = self.messages or [{"role": "user", "content": self.prompt}]
        return [*messages, {"role": "assistant", "content": self.responses[number]}]


class RewardCall:
    """A reward function and what each of its parameters stands for.

    A function of one response names `response` or `completion`, one of a group `responses`; all other names are of the
    prompt, or columns of its row. One without names (of positional-only parameters, `*arguments`, names that start
    with `_`, or in C) takes prompt, response and target in this order.

    Attributes:
        is_group: it scores all responses of a prompt at once.
        columns: names of columns that it requires.
        optional: names of columns that it takes where a row has them.
        takes_all: it takes all columns, by **kwargs.

    Raises:
        ValueError: the function takes other arguments.
    """

    def __init__(self, function: Any, name: str, is_group: bool = False) -> None:
        self.function, self.name = function, name
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # of a function in C
            parameters = []

        # Collections of arguments name nothing by themselves; `_` and `_prompt` are names for what is not used.
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        unnamed = [p for p in named if p.kind is p.POSITIONAL_ONLY or (p.name.startswith("_") and p.default is p.empty)]
        self.names = frozenset(p.name for p in named)
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.by_position = bool(unnamed) or not (named or self.takes_all)
        self.is_group = is_group or (not self.by_position and "responses" in self.names)
        wanted = {"responses"} if is_group else {"response", "completion", "responses"}

        if not self.by_position and not wanted & self.names:
            listed = ", ".join(map(str, parameters))
            raise ValueError(f"the reward {name}({listed}) names nothing of a response: name its parameters {KNOWN}")

        # What is neither of the response nor of the prompt is a column.
        known = OF_A_GROUP if self.is_group else OF_A_RESPONSE
        columns = [] if self.by_position else [p for p in named if p.name not in known]
        self.columns = tuple(p.name for p in columns if p.default is p.empty)
        self.optional = tuple(p.name for p in columns if p.default is not p.empty)

    @property
    def needs_target(self) -> bool:
        """Return whether it takes the target."""
        return self.by_position or "target" in self.names

    @property
    def reads_tokens(self) -> bool:
        """Return whether it takes more of a completion than its text."""
        return bool({"completion", "completions"} & self.names)

    def __call__(self, answers: Answers, number: int | None = None) -> Any:
        """Call the function for one response, or for all of them. MissingColumn: the row lacks one that it names."""
        if self.by_position:
            responses: Any = answers.responses if number is None else answers.responses[number]
            return self.function(answers.prompt, responses, answers.target)
        values: dict[str, Any] = {"prompt": answers.prompt, "target": answers.target}
        if number is None:
            values["responses"] = list(answers.responses)
            values["completions"] = list(answers.completions)
            values["messages"] = [answers.conversation(number) for number in range(len(answers.responses))]
            values["conversational"] = answers.conversational
        else:
            values["response"] = answers.responses[number]
            values["completion"] = answers.completions[number] if "completion" in self.names else None
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
        return self.function(**row, **{name: value for name, value in values.items() if name in self.names})


def adapt_function(function: Any) -> Any:
    """Return the function, or one of ours in its place where an extension knows another library's form of it."""
    found = (point.load()(function) for point in entry_points(group="forge.reward_forms"))
    return next((ours for ours in found if ours is not None), function)


def columns_of(calls: Sequence[RewardCall]) -> list[str] | None:
    """Return the columns that these functions take, required ones first; None: all."""
    if any(call.takes_all for call in calls):
        return None
    return list(dict.fromkeys(name for call in calls for name in (*call.columns, *call.optional)))
