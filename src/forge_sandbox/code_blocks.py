"""Fenced blocks of code in a response, as CommonMark reads them."""

import re
from typing import NamedTuple

from markdown_it import MarkdownIt

# Only blocks. A tag such as <answer> on a separate line would start a block of HTML and hide the fence after it.
_MARKDOWN = MarkdownIt("commonmark").disable(["html_block", "reference"])
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])
PYTHON = frozenset(["python", "py", "python3", "py3", "ipython"])
_NUL = "\uf8ff"


class CodeBlock(NamedTuple):
    """A fenced block: its language in lower case, "" without one, and its lines."""

    language: str
    code: str


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced blocks of a text, in order. One that is not closed ends with the text."""
    if "```" not in text and "~~~" not in text:
        return []
    # CommonMark replaces NUL, which is kept here by a character of private use.
    fences = (token for token in _MARKDOWN.parse(text.lstrip("\ufeff").replace("\0", _NUL)) if token.type == "fence")
    return [
        CodeBlock(re.split(r"[\s{},:.]+", fence.info.strip("{}. ") + " ")[0].lower(), fence.content.replace(_NUL, "\0"))
        for fence in fences
    ]


def python_block(text: str) -> str | None:
    r"""Return the code of the last block in Python, else of the last without a language; None if there is neither.

    >>> python_block("```python\nprint(1)\n```")
    'print(1)\n'
    """
    blocks = code_blocks(text)
    programs = [block for block in blocks if block.language in PYTHON] or [b for b in blocks if not b.language]
    return programs[-1].code if programs else None
