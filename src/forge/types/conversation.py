"""A prompt's text together with the fields of the row that it was rendered from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class Conversation(str):
    """The text of a prompt, as the policy's chat template writes it, with the fields that it was rendered from.

    A model with another chat template renders `row` by its own. A judge and a program read `plain`.

    Attributes:
        row: `question`, a list of messages or the user's text, and as far as there are any `system`, `tools` and
            `chat_template_kwargs`, as in a row of a data set.
    """

    row: Mapping[str, Any]

    def __new__(cls, text: str, row: Mapping[str, Any] | None = None) -> Conversation:
        """Return the text with the fields of its row; without a row the text itself is the question."""
        conversation = super().__new__(cls, text)
        conversation.row = {"question": text} if row is None else row
        return conversation

    @property
    def plain(self) -> str:
        """Return what the prompt says as text for people and programs: the question by itself, or each message, and the
        tools, after its role."""
        question = self.row["question"]
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        if self.row.get("system"):
            messages.insert(0, {"role": "system", "content": self.row["system"]})
        said = [f"{message['role']}: {_content_of(message)}" for message in messages]
        if self.row.get("tools"):
            said.insert(0, f"tools: {json.dumps(self.row['tools'], ensure_ascii=False)}")
        return "\n\n".join(said) if len(said) > 1 else str(messages[0]["content"])


def _content_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its tool calls as JSON."""
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join([message["content"], *calls] if message["content"] else calls)


def row_of(prompt: str) -> Mapping[str, Any]:
    """Return the fields of the row of a prompt; of a text without any, {"question": text}."""
    return Conversation(prompt, getattr(prompt, "row", None)).row


def plain_text(prompt: str) -> str:
    """Return what a prompt says, see `Conversation.plain`; a text without a row as it is.

    >>> plain_text(Conversation("<user>Why?", {"question": "Why?"}))
    'Why?'
    """
    return prompt.plain if isinstance(prompt, Conversation) else prompt
