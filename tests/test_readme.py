"""The README names files and commands that exist. Its code is checked with that of all pages, in test_pages."""

import importlib.util
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_make_targets_in_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_file_paths_in_readme_exist():
    own = re.sub(r"https?://\S+", "", README)
    for path in re.findall(r"(?:apps|docs|src|benchmarks|tutorials)/[\w/.-]*\w", own):
        assert (ROOT / path).exists(), path


def maker_of(name: str) -> ModuleType:
    """A script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def test_tested_hardware_tables_in_docs_are_up_to_date():
    maker = maker_of("make_tested")
    for path in (maker.PAGE, maker.README):
        assert path.read_text() == maker.page(path), "run python docs/make_tested.py"
    for row in maker.tested()["rows"]:
        assert row.keys() == {*maker.COLUMNS, "shown"}
        assert row["shown"]
        assert all((ROOT / path).exists() for path in row["shown"]), row["what"]


UNTESTED = re.compile(
    r"untested|never run\b|not yet run|(?:was|were) not run on|not run on (?:a|several) GPU", re.IGNORECASE
)


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"], ids=lambda path: path.name
)
def test_statements_about_untested_parts_link_to_tested_table(path: Path):
    maker = maker_of("make_tested")
    text = "\n".join(part.partition(maker.END)[2] or part for part in path.read_text().split(maker.BEGIN))
    linked = re.sub(r"\[[^\]]*\]\([^)]*#what-was-tested-on-what\)", "", text)
    assert [line for line in linked.splitlines() if UNTESTED.search(line)] == []


def test_configuration_page_is_up_to_date():
    maker = maker_of("make_configuration")
    text = maker.PAGE.read_text()
    assert text == maker.page(text), "run python docs/make_configuration.py"


def test_every_configuration_key_has_a_description():
    from forge.config import keys_of, section_in
    from forge.recipes.dpo import DPOConfig
    from forge.recipes.rl_config import RLConfig
    from forge.recipes.sft import SFTConfig
    from forge.runtime.controller import Options

    def undescribed(section):
        for key, field in keys_of(section).items():
            inner = section_in(field.annotation)
            if inner is not None and inner is not Options:
                yield from undescribed(inner)
            elif inner is None and not field.description:
                yield f"{section.__name__}.{key}"

    assert not {key for recipe in (RLConfig, SFTConfig, DPOConfig, Options) for key in undescribed(recipe)}


def test_documentation_pages_show_the_current_training_loop():
    loop = (ROOT / "apps/loop.py").read_text().split('"""\n\n', 1)[1]
    assert loop in README
    assert textwrap.indent(loop, "    ") in (ROOT / "docs/index.md").read_text()
