"""Parsing of fenced blocks of code in a response, by the rules of CommonMark."""

import re
from typing import NamedTuple

from markdown_it import MarkdownIt

# Only blocks are parsed, not the text in them. Blocks of HTML are disabled: a line with a tag such as <answer> would
# start one, and hide the fence after it.
_MARKDOWN = MarkdownIt("commonmark").disable(["html_block", "reference"])
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])
PYTHON = frozenset(["python", "py", "python3", "py3", "ipython"])
_NUL = "\uf8ff"


class CodeBlock(NamedTuple):
    """A fenced block: its language in lower case, "" if it has none, and its text."""

    language: str
    code: str


def code_blocks(text: str) -> list[CodeBlock]:
    r"""Return the fenced blocks of a text, in order. A block that is not closed ends with the text.

    >>> code_blocks("```py\n1\n```")
    [CodeBlock(language='py', code='1\n')]
    """
    if "```" not in text and "~~~" not in text:
        return []
    # CommonMark replaces NUL characters. To keep them, they are exchanged for a character of private use.
    fences = (token for token in _MARKDOWN.parse(text.lstrip("\ufeff").replace("\0", _NUL)) if token.type == "fence")
    return [
        CodeBlock(re.split(r"[\s{},:.]+", fence.info.strip("{}. ") + " ")[0].lower(), fence.content.replace(_NUL, "\0"))
        for fence in fences
    ]


def python_block(text: str) -> str | None:
    r"""Return the code of the last block in Python; if there is none, of the last block without a language, or None.

    >>> python_block("```python\nprint(1)\n```")
    'print(1)\n'
    """
    blocks = code_blocks(text)
    python_blocks = [block for block in blocks if block.language in PYTHON]
    programs = python_blocks or [block for block in blocks if not block.language]
    return programs[-1].code if programs else None
