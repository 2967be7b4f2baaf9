"""The answer of a response after its thoughts, for rewards, verifiers and environments alike."""

import re
from collections.abc import Iterator
from itertools import islice

MARKERS = 16  # maximum number of markers tried as a thought's end, or an answer of 20,000 markers is read 20,000 times
_NAMES = r"(?:think|thinking|thought|thoughts|reasoning|seed:think)"
# Qwen, DeepSeek and others; Seed-OSS; Magistral; Kimi; gpt-oss, whose answer is its message to the channel "final".
_OPENING = re.compile(rf"<{_NAMES}>|\[THINK\]|◁think▷|<\|channel\|>\s*(?:analysis|commentary)[^<]*<\|message\|>")
_CLOSING = re.compile(rf"</{_NAMES}>|\[/THINK\]|◁/think▷|<\|channel\|>\s*final[^<]*<\|message\|>")
_OPENED = re.compile(rf"(?:{_OPENING.pattern})\s*\Z")
_ENDING = re.compile(r"(?:<\|[\w:-]{1,30}\|>|</s>|<eos>|<end_of_turn>)\s{0,20}\Z")  # a token that ends a turn


def without_thoughts(text: str, prompt: object = "") -> str:
    """Return the answer of a response: the text after its last thought, stripped, without the tokens that end a turn.

    It is empty if the response ends within a thought.

    Args:
        prompt: of the response, whose chat template may have opened the thought. A value that is not text is ignored.

    >>> without_thoughts("<think>2 + 2</think>4")
    '4'
    """
    end = max((closing.end() for closing in _CLOSING.finditer(text)), default=0)
    if not end and isinstance(prompt, str) and _OPENED.search(prompt[-40:]):
        return ""
    answer, *_ = _OPENING.split(text[end:], maxsplit=1)  # up to a thought that is still open
    return _without_ending(answer)


def possible_answers(text: str, prompt: object = "") -> Iterator[str]:
    """Yield the texts that may be the answer of a response, the most probable first.

    The first is `without_thoughts`. A marker may also be a part of the answer, such as a string in a JSON object, so
    there follow the whole text, unless the prompt opened a thought, and the text after each of the first markers.
    The caller takes the first text that it recognises as an answer.
    """
    yield without_thoughts(text, prompt)
    if not (isinstance(prompt, str) and _OPENED.search(prompt[-40:])):
        yield _without_ending(text)
    for closing in islice(_CLOSING.finditer(text), MARKERS):
        yield _without_ending(text[closing.end() :])


def _without_ending(answer: str) -> str:
    answer = answer.strip()
    end = len(answer)
    # Only the last 60 characters are searched: in a whole answer of 200,000 spaces the pattern took 58 seconds.
    while ending := _ENDING.search(answer, max(0, end - 60), end):
        end = ending.start()
    return answer[:end].rstrip()


def after_thoughts(text: str) -> str:
    r"""Return `without_thoughts`, with the indentation of its first line, which matters in a block of code.

    >>> after_thoughts("<think>2 + 2</think>\n4")
    '4'
    """
    answer = without_thoughts(text)
    start = text.rfind(answer) if answer else len(text)
    line = text.rfind("\n", 0, start) + 1
    return text[line:start] + answer if text[line:start].isspace() else answer
