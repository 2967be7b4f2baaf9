"""Write the lists of docs/configuration.md from the models that a configuration is checked with.

python docs/make_configuration.py
"""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path
from typing import Any

from apps.code.config import CodeConfig
from apps.tools.main import ToolsConfig
from apps.weaver.config import WeaverConfig
from forge.config import Section, choices_in, keys_of, section_in
from forge.recipes.dpo import DPOConfig
from forge.recipes.reward_model import RewardModelConfig
from forge.recipes.rl_config import RLConfig
from forge.recipes.sft import SFTConfig
from forge.runtime.controller import Options, Placement

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- made by make_configuration.py -->\n", "<!-- end of the lists -->\n"
RECIPES: dict[str, type[Section]] = {
    "grpo": RLConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward_model": RewardModelConfig,
    "tools": ToolsConfig,
    "code": CodeConfig,
    "weaver": WeaverConfig,
}
SHORT, LONG = 11, 11  # words of a line: two sentences up to SHORT, one is cut beyond LONG
ALIKE = 5  # lines that two sections share before the second names the first

Found = dict[type[Section], dict[str, list[str]]]  # sections, where they stand, and in which recipes


def collect(section: type[Section], where: str, recipe: str, found: Found) -> None:
    """All sections below one; those of services are all alike."""
    found.setdefault(section, {}).setdefault(where, []).append(recipe)
    for key, field in keys_of(section).items():
        inner = section_in(field.annotation)
        if inner is not None and inner is not Placement:
            several = {list: "[]", dict: ".NAME"}.get(typing.get_origin(field.annotation), "")
            collect(inner, f"{where}.{key}{several}".lstrip("."), recipe, found)


def choices(hint: Any) -> list[str]:
    """The names that a key takes, if it takes no others."""
    options = [option for option in typing.get_args(hint) or (hint,) if option is not type(None)]
    literals = [option for option in (hint, *options) if typing.get_origin(option) is typing.Literal]
    return [str(choice) for choice in choices_in(literals[0])] if literals else []


def shown(field: Any) -> str:
    """The default as YAML, and the other choices. A key without a default, or a section, has none."""
    if field.is_required() or section_in(field.annotation) is not None:
        return ""
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        text = {None: "null"}.get(value, str(value).lower())
    else:
        text = str(list(value) if isinstance(value, tuple) else value).replace("\n", "\\n") or '""'
        text = text if len(text) < 40 else "..."
    others = [choice for choice in choices(field.annotation) if choice != text]
    return f": {text}`" + (f" (`{'`, `'.join(others)}`)" if others else "")


def meaning(text: str) -> str:
    """The start of a description as far as it fits in a short line, without the pages in brackets."""
    text = re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", " ".join(text.split()))
    parts = re.split(r"(?<=[.;])(?<! al\.) ", text)
    short = parts[0]
    if len(parts) > 1 and len(" ".join(parts[:2]).split()) <= SHORT:
        short = " ".join(parts[:2])
    if len(short.split()) > LONG:
        heads = [short[: match.start()] for match in re.finditer(r"(: |, (?:such|which|of which) )", short)]
        heads = [head for head in heads if len(head.split()) >= 4 and head.count("(") == head.count(")")]
        short = next((head for head in heads if not head.startswith(("For a ", "A metric"))), short)
    return short.rstrip(".;:")


def line(key: str, field: Any) -> str:
    """The line of a key: its default, and what it is."""
    inner = section_in(field.annotation)
    about = "Placement" if inner in (Placement, Options) else inspect.getdoc(inner) if inner is not None else ""
    text = meaning(field.description or about or "")
    text = f"(required) {text}" if field.is_required() else text
    return f"- `{key}{shown(field) or '`'}: {text}"


def made() -> str:
    """All keys: top level first, then each section; what several sections have in common stands once."""
    found: Found = {}
    for name, recipe in RECIPES.items():
        collect(recipe, "", name, found)
    top: dict[str, tuple[str, list[str]]] = {}
    for name, recipe in RECIPES.items():
        for key, field in keys_of(recipe).items():
            top.setdefault(key, (line(key, field), []))[1].append(name)
    rows = dict(top.values())  # the recipes of each line
    lines = ["## Top level", "", *by_recipes(rows, set(RECIPES))]

    titles: dict[str, list[type[Section]]] = {}
    for section, places in found.items():
        if section not in RECIPES.values() and section not in (Placement, Options):
            place = next(iter(places)).removesuffix("[]").removesuffix(".NAME")
            titles.setdefault(place.rpartition(".")[2], []).append(section)
    printed: dict[str, set[str]] = {}
    for title, sections in titles.items():
        rows = {}
        all_names = {name for section in sections for names in found[section].values() for name in names}
        for section in sections:
            names = [name for names in found[section].values() for name in names]
            for key, field in keys_of(section).items():
                rows.setdefault(line(key, field), []).extend(names)
        lines += ["", f"## {title}", "", *where(found, sections, title)]
        earlier = next((name for name, old in printed.items() if len(old & set(rows)) >= ALIKE), None)
        if earlier:
            same = [row for row in rows if row in printed[earlier]]
            lines.append(f"- {', '.join(row.split(':')[0].strip('- `').join('``') for row in same)}: as in {earlier}")
        new = {row: names for row, names in rows.items() if not earlier or row not in printed[earlier]}
        lines += by_recipes(new, all_names)
        printed[title] = set(rows)
        if title == "services":
            placed = [line(key, field) for key, field in keys_of(Placement).items()]
            more = [line(key, field) for key, field in keys_of(Options).items()]
            lines += ["", "Each service:", "", *placed]
            lines += ["", "In addition, of `options(...)` in Python and services of `weaver`:", ""]
            lines += [row for row in more if row not in placed]
    return "\n".join(lines) + "\n"


def by_recipes(rows: dict[str, list[str]], all_names: set[str]) -> list[str]:
    """The lines, those of all recipes first; `weaver`, which trains nothing, does not count."""
    groups: dict[str, list[str]] = {"": []}
    for row, names in rows.items():
        few = "" if all_names - {"weaver"} <= set(names) else ", ".join(dict.fromkeys(names))
        groups.setdefault(few, []).append(row)
    lines = groups.pop("")
    for few, group in groups.items():
        lines += ["", f"Only {few}:", "", *group]
    return lines if rows and lines[0] else lines[1:]


def where(found: Found, sections: list[type[Section]], title: str) -> list[str]:
    """The path of a section that is not at the top level."""
    paths = dict.fromkeys(path for section in sections for path in found[section])
    return [] if list(paths) == [title] else [", ".join(f"`{path}`" for path in paths) + ":", ""]


def page(text: str) -> str:
    """The page with its lists as they have to be."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{made()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
