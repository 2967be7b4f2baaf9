"""YAML files: malformed ones are an error of one line with a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..system.files import read_text

# Remedies for malformed YAML by PyYAML's description of the fault; the first match counts.
REMEDIES = {
    "is also in line": "remove one",
    "escape character": r"write \\ for \, or single quotes in place of double ones",
    "found '<scalar>'": "quote the whole text, and write a quote within it twice",
    "entries are not|keys are not|line break": "quote text that begins with -, ?, > or |",
    "quoted scalar": "close the quote",
    "flow (sequence|mapping)": "close the bracket, and separate its items with commas",
    "alias|anchor": "quote text that begins with * or &",
    "constructor for the tag": "quote text that begins with !",
    "mapping values|block|simple key": "give the keys of a section the same indentation, and quote text that has ': '",
}


# Limits of one file. A hundred levels are more than Python's recursion allows for some checks of the values; numbers of
# more digits than a float has take quadratic time to parse.
MAX_VALUES = 100_000
MAX_DEPTH = 100
MAX_NUMBER = 400  # characters

Json = Any


def read_yaml(path: Path) -> Json:
    """Read a YAML file. ValueError: it has another encoding or is malformed; names the line."""
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: Path, *, fast: bool = False) -> Json:
    """Parse a text in YAML. ValueError: it is malformed; names the file and the line.

    Args:
        fast: use the parser in C, if available, whose errors are less clear.
    """
    try:
        return yaml.load(text, Loader=FastLoader if fast else Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fault = f"line {line}: the character U+{error.character:04X} is not allowed"
    except yaml.MarkedYAMLError as error:
        fault = _fault(error)
    except RecursionError:
        fault = "it is nested too deeply"
    except ValueError as error:  # a date that does not exist
        fault = str(error)
    raise ValueError(f"{path} is not valid YAML: {fault}")


def _fault(error: yaml.MarkedYAMLError) -> str:
    """Describe the fault of a text, its position and the remedy."""
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "malformed"
    if mark is None:
        return problem
    text_at_fault = mark.buffer[mark.pointer :] if mark.buffer else ""
    # Of these two faults the parser says only that it found no token.
    if text_at_fault.startswith("\t"):
        problem = "a tab: indent with spaces"
    elif "cannot start any token" in problem:
        problem = f"quote text that begins with {text_at_fault[:1]}"
    else:
        # A bracket that is never closed is a fault at the end of the file, but was opened in another line.
        if error.context_mark is not None and error.context_mark.line < mark.line:
            problem += f" ({error.context}, from line {error.context_mark.line + 1})"
        text = f"{error.context} {problem}"
        problem += next((f": {remedy}" for fault, remedy in REMEDIES.items() if re.search(fault, text)), "")
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class Strict:
    """Mixin of loaders. A duplicate key is an error, of which PyYAML uses the last; so is a document that is large with
    its aliases written out, that contains itself, or has a number of a thousand digits."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the document, if it is of a reasonable size."""
        node: yaml.Node | None = super().get_single_node()  # type: ignore[misc]
        if node is not None:
            check_size(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Json, Json]:
        """Return keys and values; each key must be unique."""
        marks: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in marks:
                first = marks[key.value].line + 1
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} is also in line {first}", problem_mark=key.start_mark
                )
            marks[key.value] = key.start_mark
        return super().construct_mapping(node, deep)  # type: ignore[misc]


def check_size(root: yaml.Node) -> None:
    """Raise ComposerError for a document that is too large with aliases written out, too deep, or contains itself."""
    sizes: dict[int, tuple[int, int]] = {}  # values and depth, by node
    # Depth first, without recursion: the nodes from the root to the current one, with their remaining children.
    ancestors: dict[int, tuple[yaml.Node, Iterator[yaml.Node]]] = {id(root): (root, _children(root))}
    while ancestors:
        node, remaining = next(reversed(ancestors.values()))
        child = next(remaining, None)
        if child is not None:
            if id(child) in ancestors:
                raise yaml.composer.ComposerError(problem="a part contains itself", problem_mark=child.start_mark)
            if id(child) not in sizes:
                ancestors[id(child)] = child, _children(child)
            continue
        ancestors.popitem()
        # A node that several aliases name is measured once, and counted each time.
        children = [sizes[id(child)] for child in _children(node)]
        values = 1 + sum(size for size, _ in children)
        depth = 1 + max((depth for _, depth in children), default=0)
        sizes[id(node)] = values, depth
        fault = ""
        if values > MAX_VALUES:
            fault = f"more than {MAX_VALUES} values, with all aliases written out"
        elif depth > MAX_DEPTH:
            fault = f"more than {MAX_DEPTH} levels"
        elif isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")):
            fault = f"a number of {len(node.value)} characters" if len(node.value) > MAX_NUMBER else ""
        if fault:
            raise yaml.composer.ComposerError(problem=fault, problem_mark=node.start_mark)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


class Loader(Strict, yaml.SafeLoader):
    """Loader that reads 1e-6 as a number, which YAML 1.1 defines as text."""


class FastLoader(Strict, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same loader with the parser of libyaml."""


for _loader in (Loader, FastLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
