"""The core without its extensions: a copy without them imports, trains, and names what a setting needs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTENSIONS = sorted(path.name for path in (ROOT / "src").glob("forge_*"))
# The environment of the tests has the whole distribution: what the copy lacks is hidden from imports.
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}.split():
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
IMPORT_CORE = """
import importlib, pathlib, forge
root = pathlib.Path(forge.__file__).parent
for path in root.rglob("*.py"):
    name = ".".join(("forge", *path.relative_to(root).with_suffix("").parts))
    if not name.endswith("__main__") and "process" not in path.stem:
        importlib.import_module(name.removesuffix(".__init__"))
"""


def copy_without(folder: Path, extensions: list[str]) -> dict[str, str]:
    """Install the distribution without some extensions and their entry points; return the environment that has it."""
    source = folder / "source"
    source.mkdir()
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", *extensions)
    for name in ("src", "apps"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    text = (source / "pyproject.toml").read_text()
    entries = re.compile(rf'^\S+ = "(?:{"|".join(extensions)})\b.*\n', re.MULTILINE)
    text = re.sub(r'"src/forge_\w+/[^"]*"', '"LICENSE"', text)
    (source / "pyproject.toml").write_text(entries.sub("", text))

    target = folder / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(target), str(source)], check=True, timeout=300)
    (target / "sitecustomize.py").write_text(BLOCK.format(names=" ".join(extensions)))
    return os.environ | {"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}


def run_python(env: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_core_imports_without_any_single_extension_installed(tmp_path: Path, extension: str):
    env = copy_without(tmp_path, [extension])
    done = run_python(env, tmp_path, "-c", IMPORT_CORE)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
@pytest.mark.full
def test_core_recipe_trains_without_any_extension_installed(tmp_path: Path):
    env = copy_without(tmp_path, EXTENSIONS)
    done = run_python(env, tmp_path, "-c", IMPORT_CORE)
    assert done.returncode == 0, done.stderr

    warmup = ["-m", "forge", "sft", str(ROOT / "apps/sft/tiny.yaml"), "--training.steps", "2"]
    done = run_python(env, tmp_path, *warmup, "--training.schedule", "constant", "--eval.problems", "4")
    assert done.returncode == 0, done.stderr

    config = str(ROOT / "apps/grpo/tiny.yaml")
    short = ["--training.steps", "2", "--training.schedule", "constant", "--eval.problems", "4", "--run.name", "core"]
    done = run_python(env, tmp_path, "-m", "forge", "train", config, *short)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/core/model/model.safetensors").exists()

    done = run_python(env, tmp_path, "-m", "forge", "train", config, *short, "--metrics.tensorboard", "true")
    assert done.returncode == 1
    assert "forge_trackers" in done.stderr


@pytest.mark.processes
def test_forge_help_imports_no_heavy_library(tmp_path: Path):
    done = run_python(
        {**os.environ},
        *(tmp_path, "-c", "import sys; from forge.cli import make_parser; make_parser(); print(*sys.modules)"),
    )
    heavy = {"numpy", "pydantic", "yaml", "torch", "transformers", "aiohttp", "scipy", "sklearn"}
    assert {*done.stdout.split()} & {"forge_agents.serving", "forge_weaver.cli", *heavy} == {
        "forge_agents.serving",
        "forge_weaver.cli",
    }
