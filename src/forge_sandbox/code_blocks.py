"""Fenced blocks of code in a response, as CommonMark reads them."""

from __future__ import annotations

import ast
import builtins
import re
from typing import NamedTuple

from markdown_it import MarkdownIt

# Blocks alone. A tag such as <answer> on a separate line would begin a block of HTML and hide the fence after it.
_MARKDOWN = MarkdownIt("commonmark").disable(["html_block", "reference"])
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])
PYTHON = frozenset(["python", "py", "python3", "py3", "ipython"])
_NUL = "\uf8ff"


class CodeBlock(NamedTuple):
    """A fenced block: its language in lower case, "" without one, and its lines."""

    language: str
    code: str


def code_blocks(text: str) -> list[CodeBlock]:
    """The fenced blocks of a text, in order. One that is not closed ends with the text."""
    if "```" not in text and "~~~" not in text:
        return []
    # CommonMark replaces NUL, which is kept here by a character of private use.
    fences = (token for token in _MARKDOWN.parse(text.lstrip("\ufeff").replace("\0", _NUL)) if token.type == "fence")
    return [
        CodeBlock(re.split(r"[\s{},:.]+", fence.info.strip("{}. ") + " ")[0].lower(), fence.content.replace(_NUL, "\0"))
        for fence in fences
    ]


def python_block(text: str) -> str | None:
    """The code of the last block in Python, else of the last without a language; None if there is neither.

    A later block without a language is the program if it is one by itself; an output or an example of use is not.
    """
    program: CodeBlock | None = None
    for block in code_blocks(text):
        if block.language in PYTHON or (not block.language and (program is None or _replaces(block, program))):
            program = block
    return None if program is None else program.code


def _replaces(block: CodeBlock, program: CodeBlock) -> bool:
    return not program.language or _stands_alone(block.code)


def _stands_alone(code: str) -> bool:
    """Whether code defines or prints something, with names that it defines or that are built in."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    definitions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [n for n in nodes if isinstance(n, ast.Name)]
    # Names that the code binds: definitions, imports, assignments, parameters, exceptions.
    defined = set(dir(builtins)) | {definition.name for definition in definitions}
    defined |= {(alias.asname or alias.name).partition(".")[0] for statement in imports for alias in statement.names}
    defined |= {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    defined |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    defined |= {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
    # A star import may define any name.
    prints = any(name.id == "print" for name in names)
    return bool(definitions or imports or prints) and ("*" in defined or all(name.id in defined for name in names))
