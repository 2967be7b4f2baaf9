"""The README's examples run, and its commands exist."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


PAGES = ["README", "docs/services", "docs/weights", "docs/algorithms", "docs/verifiers", "docs/weaver"]
PAGES += ["docs/sandbox", "docs/openenv", "docs/agents", "docs/watching", "docs/overview"]
EXAMPLES = [
    pytest.param(code, id=f"{page.stem} {number}", marks=[] if page.stem == "README" else pytest.mark.full)
    for page in (ROOT / f"{name}.md" for name in PAGES)
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
]


@pytest.mark.processes
@pytest.mark.parametrize("code", EXAMPLES)
def test_python_blocks_run(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_named_files_exist():
    own = re.sub(r"https?://\S+", "", README)
    for path in re.findall(r"(?:apps|docs|src|benchmarks|tutorials)/[\w/.-]*\w", own):
        assert (ROOT / path).exists(), path


def test_the_configuration_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs/make_configuration.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    text = maker.PAGE.read_text()
    assert text == maker.page(text), "run python docs/make_configuration.py"


def test_every_configuration_key_is_described():
    from forge.config import keys_of, section_in
    from forge.controller import Options
    from forge.recipes.dpo_config import DPOConfig
    from forge.recipes.rl_config import RLConfig
    from forge.recipes.sft_config import SFTConfig

    def undescribed(section):
        for key, field in keys_of(section).items():
            inner = section_in(field.annotation)
            if inner is not None and inner is not Options:
                yield from undescribed(inner)
            elif inner is None and not field.description:
                yield f"{section.__name__}.{key}"

    assert not {key for recipe in (RLConfig, SFTConfig, DPOConfig, Options) for key in undescribed(recipe)}
