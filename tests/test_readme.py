"""The README's examples run, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


PAGES = ["README", "docs/services", "docs/weights", "docs/algorithms", "docs/verifiers", "docs/weaver"]
PAGES += ["docs/sandbox", "docs/openenv", "docs/agents"]
EXAMPLES = [
    pytest.param(code, id=f"{page.stem} {number}")
    for page in (ROOT / f"{name}.md" for name in PAGES)
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
]


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
    for path in re.findall(r"(?:apps|docs|src|benchmarks)/[\w/.-]*\w", README):
        assert (ROOT / path).exists(), path


def test_every_configuration_key_is_documented():
    import dataclasses
    import typing

    from apps.distill.config import DistillConfig
    from apps.dpo.config import DPOConfig
    from apps.grpo.config import GRPOConfig
    from apps.reward_model.config import RewardModelConfig
    from apps.sft.config import SFTConfig
    from apps.weaver.config import WeaverConfig

    recipes = (GRPOConfig, SFTConfig, DPOConfig, RewardModelConfig, DistillConfig, WeaverConfig)
    page = (ROOT / "docs/configuration.md").read_text()

    def keys(section):
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            yield field.name.rstrip("_")
            for option in (hints[field.name], *typing.get_args(hints[field.name])):
                if dataclasses.is_dataclass(option):
                    yield from keys(option)

    known = {key for recipe in recipes for key in keys(recipe)}
    missing = sorted({key for key in known if f"`{key}`" not in page and f"## {key}" not in page})
    assert not missing
