"""A prompt's text together with the fields of the row that it was rendered from."""

import json
from collections.abc import Mapping
from typing import Any


class Conversation(str):
    """Text of a prompt, as rendered by the policy's chat template, with the row fields that it was rendered from.

    A model with another chat template renders `row` by its own. A judge and a program read `plain`.

    Attributes:
        row: `question`, a list of messages or the user's text, and as far as there are any `system`, `tools` and
            `chat_template_kwargs`, as in a row of a data set.
    """

    row: Mapping[str, Any]

    def __new__(cls, text: str, row: Mapping[str, Any] | None = None) -> "Conversation":
        """Return the text with the fields of its row; None: those that it has, or the text itself as the question."""
        conversation = super().__new__(cls, text)
        conversation.row = getattr(text, "row", {"question": text}) if row is None else row
        return conversation

    @property
    def plain(self) -> str:
        """Return the prompt as plain text without template markers: the question, or each message after its role, and
        the tools.

        >>> Conversation("<user>Why?", {"question": "Why?", "system": "Be brief."}).plain
        'system: Be brief.\\n\\nuser: Why?'
        """
        statements = [(name, as_text(self.row[name])) for name in ("tools", "system") if self.row.get(name)]
        question = self.row["question"]
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        for message in messages:
            contents = [message["content"], *map(as_text, message.get("tool_calls") or ())]
            statements.append((message["role"], "\n".join(filter(None, contents))))

        if len(statements) == 1:
            return statements[0][1]
        return "\n\n".join(f"{role}: {text}" for role, text in statements)


def as_text(value: Any) -> str:
    """Return a text unchanged, and any other value as JSON without escapes of non-ASCII letters.

    >>> as_text({"city": "東京"})
    '{"city": "東京"}'
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
