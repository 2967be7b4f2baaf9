"""Reading YAML files; the error of a malformed one is a line with the position and a fix."""

import re
from pathlib import Path
from typing import Any

import yaml

from ..system.files import read_text

# {pattern of PyYAML's description of a fault: its fix}; the first match counts.
FIXES = {
    "is also in line": "remove one",
    "escape character": r"write \\ for \, or single quotes instead of double ones",
    "found '<scalar>'": "quote the whole text, and write a quote within it twice",
    "entries are not|keys are not|line break": "quote text that starts with -, ?, > or |",
    "quoted scalar": "close the quote",
    "flow (sequence|mapping)": "close the bracket, and separate its items with commas",
    "alias|anchor": "quote text that starts with * or &",
    "constructor for the tag": "quote text that starts with !",
    "mapping values|block|simple key": "give the keys of a section the same indentation, and quote text that has ': '",
}
Json = Any


def read_yaml(path: Path) -> Json:
    """Return the data in a YAML file. ValueError: it is not UTF-8 or is malformed; names the line."""
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: Path) -> Json:
    """Return the data in the text of a YAML file. ValueError: it is malformed; names the file and the line."""
    # Copied from a page that lost its spaces, where keys of different sections are duplicates.
    if len(re.findall(r"(?m)^\w+:[ ]*(?:#.*)?$", text)) > 1 and not re.search(r"(?m)^[ \t-]", text):
        raise ValueError(f"{path} has sections but no indented lines: indent the keys below each section by two spaces")

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fault = f"line {line}: the character U+{error.character:04X} is not allowed"
    except yaml.MarkedYAMLError as error:
        fault = _describe_fault(error)
    except RecursionError:
        fault = "it is nested too deeply"
    except ValueError as error:  # a number with thousands of digits
        fault = str(error)
    raise ValueError(f"{path} is not valid YAML: {fault}")


def _describe_fault(error: yaml.MarkedYAMLError) -> str:
    """Return one line with the position of a fault, its description and the fix."""
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "malformed"
    if mark is None:
        return problem

    text_at_fault = mark.buffer[mark.pointer :] if mark.buffer else ""
    if text_at_fault.startswith("\t"):
        problem = "a tab: indent with spaces"
    elif "cannot start any token" in problem:
        problem = f"quote text that starts with {text_at_fault[:1]}"
    else:
        # A fault may start earlier than where it shows, as with a bracket that is never closed.
        if error.context_mark is not None and error.context_mark.line < mark.line:
            problem += f" ({error.context}, from line {error.context_mark.line + 1})"
        text = f"{error.context} {problem}"
        problem += next((f": {fix}" for fault, fix in FIXES.items() if re.search(fault, text)), "")

    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-6 as a number, which is text in YAML 1.1, dates as text, and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Json, Json]:
        """Return a YAML mapping as a dict. ConstructorError: a key is given twice."""
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
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
# Dates and times are text, of which YAML 1.1 makes dates and numbers to the base 60: 1:30 would be 90.
for _sign in "-+0123456789":
    Loader.yaml_implicit_resolvers[_sign].insert(
        0, ("tag:yaml.org,2002:str", re.compile(r"[-+]?\d[\d_]*(?::\d|-\d\d?-\d).*"))
    )
