"""Write the tables of docs/configuration.md from the models that a configuration is checked with.

python docs/make_configuration.py
"""

from __future__ import annotations

import inspect
import typing
from pathlib import Path
from typing import Any

from apps.code.config import CodeConfig
from apps.tools.main import ToolsConfig
from apps.weaver.config import WeaverConfig
from forge.config import Section, choices_in, keys_of, section_in
from forge.recipes.distill import DistillConfig
from forge.recipes.dpo import DPOConfig
from forge.recipes.reward_model import RewardModelConfig
from forge.recipes.rl_config import RLConfig
from forge.recipes.sft import SFTConfig
from forge.runtime.controller import Placement

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- made by make_configuration.py -->\n", "<!-- end of the tables -->\n"
RECIPES: dict[str, type[Section]] = {
    "grpo": RLConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward_model": RewardModelConfig,
    "distill": DistillConfig,
    "tools": ToolsConfig,
    "code": CodeConfig,
    "weaver": WeaverConfig,
}
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

Found = dict[type[Section], dict[str, list[str]]]  # sections, where they stand, and in which recipes


def collect(section: type[Section], where: str, recipe: str, found: Found) -> None:
    """All sections below one; those of services are all alike."""
    found.setdefault(section, {}).setdefault(where, []).append(recipe)
    for key, field in keys_of(section).items():
        inner = section_in(field.annotation)
        if inner is not None and inner is not Placement:
            several = {list: "[]", dict: ".NAME"}.get(typing.get_origin(field.annotation), "")
            collect(inner, f"{where}.{key}{several}".lstrip("."), recipe, found)


def kind(hint: Any, limits: typing.Iterable[Any] = ()) -> str:
    """A type as a reader of YAML knows it."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind(options[0], options[1:])
    if section_in(hint) is not None:
        text = {list: "list of sections", dict: "sections by name"}.get(origin, "section")
        return f"{text}, null" if type(None) in options else text
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in choices_in(hint))
    if origin in (list, tuple):
        return f"list of {kind(options[0])}"
    if origin is dict:
        return "mapping"
    options = tuple(option for option in options if not getattr(option, "python_only", False))
    if options:
        return ", ".join(kind(option, limits) if option is not type(None) else "null" for option in options)
    bounds = []
    for name, limit in ((name, getattr(limit, name)) for limit in limits for name in LIMITS if hasattr(limit, name)):
        above_whole = hint is int and name == "gt"
        bounds.append(f"at least {limit + 1}" if above_whole else f"{LIMITS[name]} {limit:g}")
    return " ".join([WORDS.get(hint, "any"), *bounds])


def default(field: Any) -> str:
    """What a key is if it is not given."""
    if field.is_required():
        return "must be set"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        given = value.model_dump(exclude_unset=True)
        return ", ".join(f"`{name}: {given[name]}`" for name in given)
    if value is None or isinstance(value, bool):
        return str({None: "null"}.get(value, str(value).lower()))
    shown = str(list(value) if isinstance(value, tuple) else value).replace("\n", "\\n").replace("|", "\\|")
    return f"`{shown}`" if shown else "empty"


def meaning(field: Any) -> str:
    """The description of a field; of a section, that of its class."""
    inner = section_in(field.annotation)
    text = field.description or (inspect.getdoc(inner) if inner is not None else "") or ""
    return " ".join(text.split()).replace("|", "\\|")


def table(section: type[Section], without: typing.Container[str] = ()) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in keys_of(section).items():
        if key not in without:
            type_ = kind(field.annotation, field.metadata)
            rows.append(f"| `{key}` | {type_} | {default(field)} | {meaning(field)} |")
    return rows if len(rows) > 2 else []


def made() -> str:
    """All tables: top level first, then each section; what the sections of a key have in common stands once."""
    found: Found = {}
    for name, recipe in RECIPES.items():
        collect(recipe, "", name, found)
    keys: dict[str, tuple[str, Any, list[str]]] = {}
    for name, recipe in RECIPES.items():
        for key, field in keys_of(recipe).items():
            keys.setdefault(key, (kind(field.annotation, field.metadata), field, []))[2].append(name)
    lines = ["## Top level", "", "| key | type | default | recipes | meaning |", "|---|---|---|---|---|"]
    for key, (type_, field, names) in keys.items():
        inner = section_in(field.annotation)
        given = "" if inner is not None and not field.is_required() else default(field)
        everywhere = "all" if len(names) == len(RECIPES) else ", ".join(names)
        lines.append(f"| `{key}` | {type_} | {given} | {everywhere} | {meaning(field)} |")
    found = {section: places for section, places in found.items() if section not in RECIPES.values()}
    titles: dict[str, list[type[Section]]] = {}
    for section, places in found.items():
        place = next(iter(places)).removesuffix("[]").removesuffix(".NAME")
        titles.setdefault(place.rpartition(".")[2], []).append(section)
    for title, sections in titles.items():
        alike = set.intersection(*({(k, str(f)) for k, f in keys_of(section).items()} for section in sections))
        common = {key for key, _ in alike} if len(sections) > 1 else set()
        lines += ["", f"## {title}", ""]
        if common:
            lines += [*table(sections[0], set(keys_of(sections[0])) - common), ""]
        for section in sections:
            places = " and ".join(
                f"`{where}`" + ("" if len(names) == len(RECIPES) else f" of {', '.join(names)}")
                for where, names in found[section].items()
            )
            rows = table(section, common)
            if rows or not common:
                lines += [f"{places}: {' '.join((inspect.getdoc(section) or '').split())}", "", *rows, ""]
        lines.pop()
        if title == "services":
            lines += ["", "Of each service:", "", *table(Placement)]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its tables as they have to be."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{made()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
