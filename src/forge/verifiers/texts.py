"""A prompt and a response as one text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.data.prompts import PromptFormat


def prompt_format(
    tokenizer: Any,
    prompt_template: str,
    chat_template: bool | str,
    system_prompt: str | None,
    chat_options: Mapping[str, Any] | None,
) -> PromptFormat:
    """As data sets render prompts. ValueError: settings that cannot be, or a template with more than {question}."""
    found = PromptFormat(
        tokenizer,
        target_field=None,
        prompt_template=prompt_template,
        chat_template=chat_template,
        system_prompt=system_prompt,
        chat_options=chat_options,
    )
    found.fields(["question"])
    return found


def whole(how: PromptFormat, prompt: str, response: str) -> str:
    """Prompt and response; with a chat template all that it writes of the conversation. ValueError if it refuses."""
    text = how.render({"question": prompt})[0]
    if how.chat is None:
        return text + response
    system = [{"role": "system", "content": how.system_prompt}] if how.system_prompt else []
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": response}]
    return how.chat.render([*system, *turns])
