"""How reward functions are called: each parameter gets what it names."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from ..types import Completion, Prompt

Message = Mapping[str, Any]
# The parameters with a meaning of a function that scores one response. All others name columns.
OF_A_RESPONSE = ("response", "completion", "messages", "prompt", "target")
# The same of a function that scores all responses to a prompt.
OF_A_GROUP = ("responses", "completions", "messages", "prompt", "target", "conversational")
KNOWN = "prompt, response, target, completion, messages, or columns of the rows (responses: all of a prompt at once)"


class MissingColumn(ValueError):
    """Error: a reward has a parameter for a column that the prompt's row does not have."""


@dataclass(frozen=True)
class Answers:
    """The responses to one prompt, with everything that a reward may name.

    Args:
        target: None if the prompt has none.
        row: the columns of the prompt's row.
        messages: of the prompt, if it is a conversation.
        conversational: whether the prompt's row has a list of messages, and not a text.
        completions: one for each response, with its tokens, or with only its text where nothing reads tokens.
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
    ) -> "Answers":
        """Return the answers to a prompt.

        Args:
            prompt: a `Prompt`, which has its row and messages, or a text.
            completions: of the responses; None: their texts.
        """
        completions = completions or [Completion(text) for text in responses]
        if not isinstance(prompt, Prompt):
            return cls(str(prompt), responses, target, completions=completions)

        messages = list(prompt.messages)
        return cls(prompt.text, responses, target, prompt.row, messages, prompt.conversational, completions)

    def conversation(self, number: int) -> list[Message]:
        """Return the messages of the prompt, and response `number` as the assistant's last message."""
        messages = self.messages or [{"role": "user", "content": self.prompt}]
        return [*messages, {"role": "assistant", "content": self.responses[number]}]


class RewardCall:
    """A reward function, which is called with the arguments that its parameters name.

    A function that scores one response has a parameter `response` or `completion`; one that scores all responses to a
    prompt together has `responses`. Its other parameters are of the prompt, or columns of the prompt's row. A function
    whose parameters name nothing (they are positional-only, `*arguments` or start with `_`, or it is written in C) is
    called with prompt, response and target in this order.

    Args:
        name: of the function in errors.
        is_group: whether it is a method that scores all responses together, as `score_group`.

    Attributes:
        is_group: whether it scores all responses to a prompt together.
        columns: names of the columns that it requires.
        optional: names of the columns that it takes if a row has them.
        takes_all: whether it takes all columns, by **kwargs.
        by_position: whether it is called with prompt, response and target by position.

    Raises:
        ValueError: no parameter stands for a response.
    """

    def __init__(self, function: Any, name: str, is_group: bool = False) -> None:
        self.function, self.name = function, name
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a function in C has no signature
            parameters = []

        # `*arguments` and `**arguments` name nothing, and `_` or `_prompt` say that an argument is not used.
        named_parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        unnamed_parameters = [
            p
            for p in named_parameters
            if p.kind is p.POSITIONAL_ONLY or (p.name.startswith("_") and p.default is p.empty)
        ]
        self.names = frozenset(p.name for p in named_parameters)
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.by_position = bool(unnamed_parameters) or not (named_parameters or self.takes_all)
        self.is_group = is_group or (not self.by_position and "responses" in self.names)
        response_names = {"responses"} if is_group else {"response", "completion", "responses"}

        if not self.by_position and not response_names & self.names:
            signature = ", ".join(map(str, parameters))
            raise ValueError(
                f"the reward {name}({signature}) has no parameter for the response: name its parameters {KNOWN}"
            )

        # A parameter without another meaning names a column.
        reserved_names = OF_A_GROUP if self.is_group else OF_A_RESPONSE
        column_parameters = [] if self.by_position else [p for p in named_parameters if p.name not in reserved_names]
        self.columns = tuple(p.name for p in column_parameters if p.default is p.empty)
        self.optional = tuple(p.name for p in column_parameters if p.default is not p.empty)

    @property
    def needs_target(self) -> bool:
        """Return whether the function takes the target."""
        return self.by_position or "target" in self.names

    @property
    def reads_tokens(self) -> bool:
        """Return whether the function takes completions, with their tokens, and not only texts."""
        return bool({"completion", "completions"} & self.names)

    def __call__(self, answers: Answers, number: int | None = None) -> Any:
        """Return what the function returns for response `number`, or for all responses if that is None.

        Raises:
            MissingColumn: the row does not have a column that the function requires.
        """
        if self.by_position:
            responses: Any = answers.responses if number is None else answers.responses[number]
            return self.function(answers.prompt, responses, answers.target)

        values: dict[str, Any] = {"prompt": answers.prompt, "target": answers.target}
        if number is None:
            values |= {
                "responses": list(answers.responses),
                "completions": list(answers.completions),
                "messages": [answers.conversation(index) for index in range(len(answers.responses))],
                "conversational": answers.conversational,
            }
        else:
            values |= {
                "response": answers.responses[number],
                "completion": answers.completions[number] if "completion" in self.names else None,
                "messages": answers.conversation(number),
            }

        for name in self.columns:
            if name not in answers.row:
                columns = ", ".join(answers.row) or "none"
                raise MissingColumn(f"the reward {self.name} has a parameter {name!r}, but the row has only {columns}")

        columns_taken = answers.row.keys() if self.takes_all else {*self.columns, *self.optional}
        row = {name: value for name, value in answers.row.items() if name in columns_taken and name not in values}
        return self.function(**row, **{name: value for name, value in values.items() if name in self.names})


def adapt_function(function: Any) -> Any:
    """Return a reward function in this library's form. A function in the form of another library, such as TRL, is
    wrapped if an extension knows it; any other is returned as it is."""
    wrapped = (point.load()(function) for point in entry_points(group="forge.reward_forms"))
    return next((adapted for adapted in wrapped if adapted is not None), function)


def columns_of(calls: Sequence[RewardCall]) -> list[str] | None:
    """Return the names of the columns that these functions take, without duplicates; None if one of them takes all."""
    if any(call.takes_all for call in calls):
        return None
    return list(dict.fromkeys(name for call in calls for name in (*call.columns, *call.optional)))
