"""Dependencies point one way: algorithms know no processes, infrastructure knows no algorithm."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forge

SOURCE = Path(forge.__file__).parent
# The rooms from the floor up. A room imports those of its own floor and below; `config`, `models`, `observability` and
# `types` are for all that is above them.
FLOORS = [
    ["system"],
    ["config"],
    ["types", "models", "algorithms", "losses"],
    ["observability"],
    ["data"],
    ["rewards", "envs", "engines", "runtime"],
    ["training"],
    ["actors"],
    ["recipes"],
    ["cli", "__main__"],
]
LIBRARIES = ["algorithms", "losses", "data", "rewards", "envs", "engines", "models", "training"]
INFRASTRUCTURE = ["runtime", "observability", "system"]


def modules(part: str) -> list[Path]:
    """The files of a part of forge: a package or one module."""
    folder = SOURCE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{part}.py"]


def test_each_package_is_in_one_dependency_layer():
    rooms = {path.stem for path in SOURCE.iterdir() if path.name not in ("__init__.py", "__pycache__")}
    assert rooms == {room for floor in FLOORS for room in floor}
    assert len([*SOURCE.glob("*.py")]) <= 4
    assert len(rooms) + 1 <= 19


@pytest.mark.parametrize("level", range(len(FLOORS)))
def test_packages_import_only_lower_layers(level: int):
    above = [f"forge.{room}" for floor in FLOORS[level + 1 :] for room in floor]
    assert violations(FLOORS[level], above) == []


def imports(file: Path) -> Iterator[str]:
    """Absolute names of all that a file imports, anywhere in it: modules and names taken from them."""
    package = [*file.relative_to(SOURCE.parent).parent.parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def violations(parts: list[str], forbidden: list[str]) -> list[str]:
    return [
        f"{file.relative_to(SOURCE)} imports {name}"
        for part in parts
        for file in modules(part)
        for name in imports(file)
        if any(f"{name}.".startswith(f"{root}.") for root in forbidden)
    ]


@pytest.mark.parametrize("part", LIBRARIES)
def test_libraries_do_not_import_runtime_or_actors(part: str):
    assert violations([part], ["forge.runtime", "forge.actors", "monarch", "apps"]) == []


@pytest.mark.parametrize("part", INFRASTRUCTURE)
def test_infrastructure_does_not_import_algorithms(part: str):
    algorithms = [f"forge.{library}" for library in LIBRARIES]
    assert violations([part], [*algorithms, "forge.actors", "transformers", "apps"]) == []


def test_algorithms_import_only_torch():
    others = [f"forge.{path.stem}" for path in SOURCE.iterdir() if path.stem not in ("algorithms", "losses", "config")]
    others = [name for name in others if name != "forge.__init__"]
    sections = "forge.config.sections"  # plugins are resolved by name, which loads nothing
    assert violations(["algorithms", "losses"], [*others, sections, "transformers", "numpy", "pydantic"]) == []


def test_only_the_controller_imports_monarch():
    everything = [path.stem for path in SOURCE.iterdir() if path.stem != "runtime"]
    assert violations([*everything, "runtime/store", "runtime/forking"], ["monarch"]) == []
    assert violations(["runtime/controller"], ["monarch"]) != []


EXTENSIONS = sorted(path.name for path in SOURCE.parent.glob("forge_*"))
# Agents are confined as programs are; both play in environments, whose tools the reward doctor calls.
USES = {
    "forge_envs": {"forge_verifiers"},
    "forge_agents": {"forge_envs", "forge_sandbox"},
    "forge_inspect": {"forge_envs", "forge_verifiers"},
    "forge_sandbox": {"forge_envs"},
    "forge_weaver": {"forge_verifiers"},
}


def test_core_imports_no_extension_or_app():
    everything = [path.stem for path in SOURCE.iterdir()]
    assert violations(everything, [*EXTENSIONS, "apps"]) == []


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_extensions_import_no_app_or_other_extension(extension: str):
    files = sorted((SOURCE.parent / extension).rglob("*.py"))
    found = {name.split(".")[0] for file in files for name in imports(file)}
    assert "forge" in found or extension == "forge_http"
    assert not found & ({"apps", *EXTENSIONS} - {extension} - USES.get(extension, set()) - {"forge_http"})


def test_sandbox_programs_do_not_import_forge():
    files = sorted((SOURCE.parent / "forge_sandbox/inside").rglob("*.py"))
    assert len(files) > 5
    own = [name for file in files for name in imports(file) if name.split(".")[0].startswith("forge")]
    assert [name for name in own if not name.startswith("forge_sandbox.inside")] == []


def test_workers_under_other_python_versions_do_not_import_forge():
    files = sorted((SOURCE.parent / "forge_agents/workers").rglob("*.py"))
    assert len(files) > 2
    assert [name for file in files for name in imports(file) if name.split(".")[0].startswith("forge")] == []


def test_lower_layers_do_not_import_recipes():
    top = ("recipes", "api", "cli", "__init__", "__main__")
    below = [path.stem for path in SOURCE.iterdir() if path.stem not in top]
    assert violations(below, ["forge.recipes", "forge.recipes.api", "forge.cli"]) == []


def at_import(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that run when it is imported, type checkers' own aside."""
    for node in nodes:
        yield node
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test)):
            yield from at_import(node.body)


def test_modules_have_no_circular_imports():
    files = {path: path.with_suffix("") for path in sorted(SOURCE.parent.rglob("*.py"))}
    names = {
        ".".join(bare.relative_to(SOURCE.parent).parts).removesuffix(".__init__"): path for path, bare in files.items()
    }
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        found: set[str] = set()
        for node in at_import(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *filter(None, [node.module])])
                found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in names else source for a in node.names}
        graph[name] = (found & names.keys()) - {name}
    assert graph["forge.recipes.rl"] > {"forge.recipes.components"}
    # Modules that import nothing that is left are taken out, until none can be: what remains is a circle.
    left = dict(graph)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"import circles among {sorted(left)}"


@pytest.mark.processes
def test_losses_import_only_torch():
    code = "import torch, sys; old = set(sys.modules); import forge.losses; print(*(set(sys.modules) - old))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in result.stdout.split()} == {"forge"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        ("forge", {"torch", "numpy", "transformers", "monarch"}),
        ("forge.rewards", {"torch", "transformers", "aiohttp"}),
        (
            "forge.data.load, forge.rewards.rules, forge.models.tokenizer",
            {"torch", "monarch", "transformers", "datasets", "math_verify", "sympy"},
        ),
        (
            "apps.grpo.main, forge.recipes.rl",
            {"torch.distributed.tensor", "sympy", "transformers.modeling_utils", "torch._dynamo", "pyarrow", "flask"},
        ),
    ],
)
def test_forge_imports_do_not_load_slow_dependencies(modules: str, slow: set[str]):
    code = f"import sys, {modules}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not slow & set(result.stdout.split())
