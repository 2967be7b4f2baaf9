"""YAML as people write it: malformed files are one line that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..system.files import read_text

# Of malformed YAML, by what PyYAML says about it; the first that fits.
REMEDIES = {
    "is also in line": "leave out one",
    "escape character": r"write \\ for \, or single quotes in place of double ones",
    "found '<scalar>'": "quote the whole text, and write a quote within it twice",
    "entries are not|keys are not|line break": "quote text that begins with -, ?, > or |",
    "quoted scalar": "close the quote",
    "flow (sequence|mapping)": "close the bracket, and separate its items with commas",
    "alias|anchor": "quote text that begins with * or &",
    "constructor for the tag": "quote text that begins with !",
    "mapping values|block|simple key": "give the keys of a section the same indentation, and quote text that has ': '",
}


MOST_VALUES, DEEPEST, LONGEST_NUMBER = 100_000, 100, 400


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. ValueError: it has another encoding or is malformed; names the line."""
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: Path, *, fast: bool = False) -> Any:
    """The content of a text in YAML. ValueError: it is malformed; names the file and the line.

    Args:
        fast: with the parser in C, if it is there, whose errors are less clear.
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
    except ValueError as error:  # of a date that does not exist
        fault = str(error)
    raise ValueError(f"{path} is not valid YAML: {fault}")


def _fault(error: yaml.MarkedYAMLError) -> str:
    """What a parser found where, and what to do."""
    mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or "malformed"
    if mark is None:
        return problem
    rest = mark.buffer[mark.pointer :] if mark.buffer else ""
    if rest.startswith("\t"):
        problem = "a tab: indent with spaces"
    elif "cannot start any token" in problem:
        problem = f"quote text that begins with {rest[:1]}"
    else:
        if error.context_mark is not None and error.context_mark.line < mark.line:
            problem += f" ({error.context}, from line {error.context_mark.line + 1})"
        text = f"{error.context} {problem}"
        problem += next((f": {remedy}" for fault, remedy in REMEDIES.items() if re.search(fault, text)), "")
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class Strict:
    """A part of loaders: a key that is there twice is an error, of which PyYAML keeps the last alone, and so is what
    becomes large when aliases are written out, contains itself, or is a number of a thousand digits."""

    def get_single_node(self) -> yaml.Node | None:
        """The document, if it is of a reasonable size."""
        node: yaml.Node | None = super().get_single_node()  # type: ignore[misc]
        if node is not None:
            check_size(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Keys and values, each key once."""
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
    """ComposerError: a document is too large with all aliases written out, too deep, or contains itself."""
    sizes: dict[int, tuple[int, int]] = {}  # values and depth, by node
    around: dict[int, tuple[yaml.Node, Iterator[yaml.Node]]] = {id(root): (root, _inner(root))}
    while around:
        node, rest = next(reversed(around.values()))
        child = next(rest, None)
        if child is not None:
            if id(child) in around:
                raise yaml.composer.ComposerError(problem="a part contains itself", problem_mark=child.start_mark)
            if id(child) not in sizes:
                around[id(child)] = child, _inner(child)
            continue
        around.popitem()
        inner = [sizes[id(one)] for one in _inner(node)]
        sizes[id(node)] = values, depth = (
            1 + sum(one for one, _ in inner),
            1 + max((one for _, one in inner), default=0),
        )
        fault = ""
        if values > MOST_VALUES:
            fault = f"more than {MOST_VALUES} values, with all aliases written out"
        elif depth > DEEPEST:
            fault = f"more than {DEEPEST} levels"
        elif isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")):
            fault = f"a number of {len(node.value)} characters" if len(node.value) > LONGEST_NUMBER else ""
        if fault:
            raise yaml.composer.ComposerError(problem=fault, problem_mark=node.start_mark)


def _inner(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


class Loader(Strict, yaml.SafeLoader):
    """Reads 1e-6 as a number, which YAML 1.1 takes for text."""


class FastLoader(Strict, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same with the parser of libyaml."""


for _loader in (Loader, FastLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
