"""What a response says after its thoughts, for rewards, verifiers and environments alike."""

from __future__ import annotations

import re

_NAMES = r"(?:think|thinking|thought|thoughts|reasoning|seed:think)"
# Qwen, DeepSeek and others; Seed-OSS; Magistral; Kimi; gpt-oss, whose answer is its message to the channel "final".
_OPENING = re.compile(rf"<{_NAMES}>|\[THINK\]|◁think▷|<\|channel\|>\s*(?:analysis|commentary)[^<]*<\|message\|>")
_CLOSING = re.compile(rf"</{_NAMES}>|\[/THINK\]|◁/think▷|<\|channel\|>\s*final[^<]*<\|message\|>")
_OPENED = re.compile(rf"(?:{_OPENING.pattern})\s*\Z")
_ENDING = re.compile(r"(?:<\|return\|>|<\|end\|>)\s*\Z")


def without_thoughts(text: str, prompt: object = "") -> str:
    """The text after the last thought, stripped; empty while a thought is open.

    Args:
        prompt: its chat template may have opened the thought. What is not text is ignored.
    """
    end = 0
    for closing in _CLOSING.finditer(text):
        end = closing.end()
    if not end and isinstance(prompt, str) and _OPENED.search(prompt[-40:]):
        return ""
    answer = text[end:]
    opening = _OPENING.search(answer)
    if opening is not None:
        answer = answer[: opening.start()]
    return _ENDING.sub("", answer).strip()
