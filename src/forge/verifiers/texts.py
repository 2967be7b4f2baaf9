"""A prompt and a response as one text, and which settings of that go together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge.data.prompts import PromptFormat

BLANK_LINE = r"\n\s*\n"


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


def check_prompt(
    prompt_template: str,
    chat_template: bool | str,
    system_prompt: str | None,
    chat_options: Mapping[str, Any] | None,
) -> None:
    """What `prompt_format` refuses whatever the tokenizer. ValueError: says what."""
    if chat_template:  # only the tokenizer knows what it takes
        system_prompt = chat_options = None
    prompt_format(None, prompt_template, False, system_prompt, chat_options)


def check_joining(as_pair: bool, append_eos: bool | None, truncate: bool, chat_template: bool | str) -> None:
    """Settings of `RewardModel`. ValueError: two that do not go together, whatever the model."""
    if as_pair and (chat_template or append_eos is not None):
        raise ValueError("as_pair joins the texts as the tokenizer does: leave chat_template and append_eos out")
    if truncate and (chat_template or (append_eos is False and not as_pair)):
        raise ValueError("truncate is for pairs, and for responses that eos ends: leave it out")


def check_steps(marker: str, separator: str, good: str | None, bad: str | None) -> None:
    """Settings of `ProcessRewardModel`. ValueError: one that cannot be, whatever the model."""
    if not marker:
        raise ValueError("marker must be set: the text after each step at which the model reads it")
    if (good is None) != (bad is None):
        raise ValueError("set both good and bad for a causal language model, or none for a token classifier")
    if good is not None and good == bad:
        raise ValueError(f"good and bad must be two different texts, both are {good!r}")
    try:
        re.compile(separator)
    except re.error as error:
        raise ValueError(f"separator {separator!r} is not a regular expression: {error}") from None
