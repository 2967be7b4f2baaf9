"""Code blocks of the documentation: python runs, bash and yaml are checked against the real parsers and settings. A
block without a check is marked `<!-- not run: REASON -->` on the line before it."""

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple, get_origin

import pytest
import yaml

from forge.cli import clean, recipes
from forge.config import Arguments, ConfigError, keys_of, read, section_in
from forge.config.yaml_files import Loader
from forge_agents import serving as serve
from forge_cluster import launch_command as launch, worker_command as worker
from forge_compat import convert
from forge_inspect.cli import audit, doctor, evaluate, mismatch, plan, replay, runs, watch
from forge_tinker import command as tinker
from forge_tinker.tenants import TinkerSettings
from forge_verifiers.config import VerifiersConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"python", "bash", "yaml", "text"}
MARK = re.compile(r"<!-- not run: \S.* -->\s*\Z")
COMMANDS = (
    *(recipes, serve, clean, worker, doctor, launch, plan, evaluate),
    *(audit, mismatch, replay, runs, watch, convert, tinker),
)
# Words of the shell, and programs that come with every machine.
SHELL = {"export", "source", "until", "do", "done", "cd", "[", "break"}

_spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs/make_configuration.py")
_maker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_maker)
CONFIGS = _maker.RECIPES
# `forge NAME CONFIG` -> the name of the configuration.
BY_COMMAND = {"train": "grpo", "sft": "sft", "dpo": "dpo", "reward-model": "reward_model"}


class Block(NamedTuple):
    page: str
    number: int
    language: str
    code: str
    marked: bool

    @property
    def name(self) -> str:
        return f"{self.page} {self.number}"


def blocks_of(path: Path) -> list[Block]:
    text, found = path.read_text(), []
    for number, match in enumerate(FENCE.finditer(text), 1):
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        marked = MARK.search(text[: match.start()]) is not None
        found.append(Block(str(path.relative_to(ROOT)), number, match["language"].strip(), code, marked))
    return found


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
BASH = [block for block in BLOCKS if block.language == "bash" and not block.marked]
YAML = [block for block in BLOCKS if block.language == "yaml" and not block.marked]


def cases(blocks: list[Block]) -> list:
    return [pytest.param(block, id=block.name) for block in blocks]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_in_docs_are_fenced_and_name_a_language(path):
    unknown = {block.language for block in blocks_of(path)} - LANGUAGES
    assert not unknown, f"blocks are {', '.join(sorted(LANGUAGES))}"
    # Indented code would be checked by nothing. Indented paragraphs of lists, tabs and notes are no code.
    prose = FENCE.sub("", path.read_text())
    for before, line in re.findall(r"^([^\n]*)\n\s*\n( {4}[^\n]*)", prose, re.MULTILINE):
        assert re.match(r" |[-*] |\d+\. |===|!!!|\?\?\?", before), f"indented code: {line}"


@pytest.mark.parametrize("block", cases(PYTHON))
def test_python_blocks_in_docs_parse_and_imports_exist(block):
    tree = compile(block.code, block.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"forge", "forge_sandbox"}:
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, f"{node.module} has no {missing}"


# Runs each block in a folder of its own, all in one process, as in a notebook: imports are most of their time.
RUN_BLOCKS = """
import os, runpy, sys

root = os.getcwd()
for number in sys.argv[1:]:
    os.chdir(f"{root}/{number}")
    sys.path[0], sys.argv = os.getcwd(), ["example.py"]
    runpy.run_path("example.py", run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON if not block.marked}))
def test_python_blocks_in_docs_run_without_error(page, tmp_path):
    first_pages = {block.code: block.page for block in reversed(PYTHON)}  # a block may be on several
    blocks = [block for block in PYTHON if block.page == page == first_pages[block.code] and not block.marked]
    for block in blocks:
        (tmp_path / str(block.number)).mkdir()
        (tmp_path / str(block.number) / "example.py").write_text(block.code)

    command = [sys.executable, "-c", RUN_BLOCKS, *(str(block.number) for block in blocks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    # The loop of README and the front page learns: six runs ended with .98 or more.
    assert all(float(reward) > 0.8 for reward in re.findall(r"step 60: reward (.*)", done.stdout)), done.stdout


@pytest.mark.parametrize("block", cases(YAML))
def test_yaml_blocks_in_docs_use_existing_config_keys(block):
    values = yaml.load(block.code, Loader=Loader)
    sections = [*CONFIGS.values(), VerifiersConfig, TinkerSettings]
    if isinstance(values, dict) and values.keys() <= keys_of(VerifiersConfig).keys():
        sections = [VerifiersConfig]
    errors = [
        _unknown(section.canonical(values) if isinstance(values, dict) else values, section) for section in sections
    ]
    assert None in errors, f"unknown keys: {sorted({error for error in errors if error})}"


def _unknown(values: dict, section: type, where: str = "") -> str | None:
    """The first key that the section does not have."""
    if section.model_config.get("extra") == "allow":
        return None
    keys = keys_of(section)
    for name, value in values.items():
        if name not in keys:
            return f"{where}{name}"
        inner = section_in(keys[name].annotation)
        if inner is not None and get_origin(keys[name].annotation) is dict:
            value = list(value.values())  # sections by names of the user's
        if inner is not None:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict) and (found := _unknown(part, inner, f"{where}{name}.")):
                    return found
    return None


@pytest.mark.parametrize("block", cases(BASH))
def test_bash_blocks_in_docs_use_existing_commands_and_options(block, capsys):
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        commands: list[list[str]] = [[]]
        for word in words:
            if word in ("&&", "||", "|", ";"):
                commands.append([])
            else:
                commands[-1].append(word.removesuffix(";"))
                if word.endswith(";"):
                    commands.append([])
        for command in commands:
            while (command and re.match(r"[A-Z_]+=", command[0])) or command[:1] in (["until"], ["do"]):
                command = command[1:]
            if command:
                _check(command, line)


def _check(command: list[str], line: str) -> None:
    program, *words = command
    words = words[: words.index(">")] if ">" in words else words
    if program in SHELL:
        return
    if program == "forge":
        _check_forge(words)
    elif program in ("python", "python3", "$(VENV)/bin/python") or program.endswith("/bin/python"):
        _check_python([word for word in words if word != "-P"])
    elif program == "make":
        targets = re.findall(r"^([\w./-]+):|^(?=\$\(VENV\)/(\S+):)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        known = {first or f".venv/{second}" for first, second in targets}
        assert all("=" in word or word in known for word in words), f"no such target: {line}"
    elif program == "pip" or program.endswith("/bin/pip"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for word in words:
            asked = re.search(r"^\.\[(.*)\]$", word)
            assert not asked or set(asked[1].split(",")) <= extras.keys(), f"no such extra: {line}"
    elif program.startswith("./scripts/"):
        assert all(word in (ROOT / program).read_text() for word in words), f"no such option: {line}"
    elif program in ("kubectl", "sky", "torchrun", "torchx"):  # what follows a command of ours, in start/cluster.md
        return
    else:
        pytest.fail(f"nothing checks {line!r}: mark the block with <!-- not run: REASON -->")


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if words[1] in ("venv", "pip", "pytest"):
            return
        assert importlib.util.find_spec(words[1]), f"no module {words[1]}"
        recipe = re.fullmatch(r"apps\.(\w+)\.main", words[1])
        if recipe and recipe[1] in CONFIGS:
            _check_configuration(recipe[1], words[2:])
    elif not words[0].startswith("-"):
        text = (ROOT / words[0]).read_text()
        options = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
        # Some scripts pass their options on.
        shared = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
        assert all(f'"{option}"' in text or f'"{option}"' in shared for option in options), f"{words[0]}: {options}"


def _check_forge(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="forge")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in COMMANDS:
        module.add_to(commands)
    if words[0] == "weaver":
        pytest.importorskip("sklearn")
        importlib.import_module("forge_weaver.cli").add_to(commands)
    if words[0] == "agents":
        importlib.import_module("forge_agents.cli").add_to(commands)
    if words in (["--help"], [words[0], "--help"]):
        return
    args = parser.parse_args(words)
    if args.command in BY_COMMAND:
        _check_configuration(BY_COMMAND[args.command], ["--config", args.config, *args.overrides])
    elif args.command == "launch" and args.launcher in ("slurm", "kubernetes"):
        config = args.rest[0] if (ROOT / args.rest[0]).exists() else "apps/grpo/tiny.yaml"
        again = parser.parse_args(["launch", args.launcher, str(ROOT / config), *args.rest[1:], "--dry-run"])
        again.run(again)


def _check_configuration(recipe: str, words: list[str]) -> None:
    """The file, or another of the recipe where a page says `my.yaml`, takes these overrides."""
    arguments = Arguments.parse(words)
    path = ROOT / (arguments.config or "my.yaml")
    if not path.is_file():
        assert re.fullmatch(r"my\.yaml|CONFIG|FILE", path.name), f"{path} does not exist"
        path = ROOT / "apps" / recipe / "tiny.yaml"
    try:
        read(CONFIGS[recipe], path, arguments.overrides)
    except ConfigError as error:
        if "is not installed here" not in str(error):
            pytest.fail(f"{' '.join(words)}: {error}")


def test_documented_benchmark_commands_can_start():
    """A script that imports another benchmark needs `python -m`: a path puts its own folder on the path only."""
    texts = [path.read_text() for path in [*PAGES, *sorted((ROOT / "benchmarks").glob("*.py"))]]
    commands = {match for text in texts for match in re.findall(r"python3? (-m )?benchmarks[/.](\w+)", text)}
    assert len(commands) > 20
    for as_module, name in sorted(commands):
        source = (ROOT / "benchmarks" / f"{name}.py").read_text()
        modules = {node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        imports_others = any(module.partition(".")[0] in ("benchmarks", "tests") for module in modules)
        assert as_module or not imports_others or "sys.path[:0]" in source, f"write python -m benchmarks.{name}"
