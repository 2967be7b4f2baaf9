"""Docstrings, comments and messages use the field's terms."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Each with the term to use in its place.
BANNED = {
    r"told": "given, set, known",
    r"anew": "again, retry",
    r"refus\w+": "reject, raise, unsupported",
    r"nobody|whoever": "name who it is",
    r"likeliest": "most probable, top logprobs",
    r"goes on|gone on|go on from": "continue, resume",
    r"will not do|that cannot be(?! \w+ed)": "invalid, unsupported",
    r"what is (?:wrong|missing|left|read|asked|known|made)": "name the thing: the error, the missing columns",
    r"in vain|as ever": "timed out, as before",
    r"of (?:its|their) own(?! (?:router|tokens|files|request|classes|words))": "separate, its own",
    r"(?<!there )(?<!There )is no (?!longer|such|more|worse|better|faster|slower)\w+": "is not a",
    r"leaves? (?:it|them|\w+) out": "omit",
}
PATTERN = re.compile("|".join(rf"\b(?:{words})\b" for words in BANNED), re.IGNORECASE)
FILES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "apps").rglob("*.py"))


def prose(source: str) -> list[tuple[int, str]]:
    """Comments and text of more than one word, docstrings and the fixed parts of messages among it, by line."""
    found = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            found.append((node.lineno, node.value))
    return found


# What a docstring begins with must be understood without the name and the code below it.
FRAGMENT = re.compile(r"(?:Of|As|In the|Those|These|So that|Whose|What a|What is)\b")


def test_docstrings_do_not_start_with_sentence_fragments():
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    fragments = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, owners) else None
            if text and FRAGMENT.match(text):
                fragments.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not fragments, "\n".join(fragments)


def test_docstrings_comments_and_messages_use_terms_of_the_field():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {match.group()!r}"
        for path in FILES
        for line, text in prose(path.read_text())
        for match in PATTERN.finditer(text)
    ]
    assert not wrong, "\n".join(wrong)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_use_terms_of_the_field(path):
    # Code of examples, and words that are quoted as words, are not prose.
    text = re.sub(r"```.*?```|^(?: {4}|\t)[^\n]*$|`[^`\n]*`|\"[^\"\n]*\"", "", path.read_text(), flags=re.S | re.M)
    wrong = [match.group() for match in PATTERN.finditer(text)]
    assert not wrong
