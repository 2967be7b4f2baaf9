"""The README names files and commands that exist. Its code is checked with that of all pages, in test_pages."""

import importlib.util
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_make_targets_in_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_named_in_readme_exist():
    own = re.sub(r"https?://\S+", "", README)
    for path in re.findall(r"(?:apps|docs|src|benchmarks|tutorials)/[\w/.-]*\w", own):
        assert (ROOT / path).exists(), path


def test_configuration_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs/make_configuration.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
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


def test_pages_show_the_loop_that_runs():
    loop = (ROOT / "apps/loop.py").read_text().split('"""\n\n', 1)[1]
    assert loop in README
    assert textwrap.indent(loop, "    ") in (ROOT / "docs/index.md").read_text()
