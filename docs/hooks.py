"""Hooks of `mkdocs build`: pages made from other files, links to sources, diagrams within the page.

The API pages come from the packages' `__all__`, the tutorials from tutorials/ (with outputs, if build/tutorials holds
the executed notebooks), the glossary from CONTRIBUTING.md, the changelog from CHANGELOG.md.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Modules of the API reference: what a user imports from, and what it is about.
MODULES = {
    "forge": "Train, evaluate and generate from Python",
    "forge.types": "Prompts, completions, episodes and groups",
    "forge.algorithms": "Algorithms and losses",
    "forge.losses": "Losses by the names of the torchforge documents",
    "forge.data": "Data sets, conversations and packing",
    "forge.rewards.rules": "Reward functions",
    "forge.rewards": "Verifiers",
    "forge.envs": "Groups of scored answers",
    "forge.engines": "Generation engines",
    "forge.training": "Trainers, optimisers and layouts",
    "forge.runtime.store": "Weight store",
    "forge.runtime.controller": "Actors and services",
    "forge.actors": "Components of a run",
    "forge.recipes": "Recipes and their configuration",
    "forge.observability": "Metrics, rollouts, reports and trackers",
    "forge_agents": "Agents at a gateway, and the server of models",
    "forge_envs": "Environments, tools and episodes of several turns",
    "forge_inspect": "Plan, audit, replay, mismatch and the reward doctor",
    "forge_inspect.watch": "The page over runs",
    "forge_cluster": "Several machines",
    "forge_compat": "Names of other libraries",
    "forge_math": "Strict comparison of answers",
    "forge_sandbox": "Sandbox",
    "forge_http": "HTTP of servers and clients",
    "forge_titan": "TorchTitan as a trainer",
    "forge_trackers": "Trackers",
    "forge_verifiers": "Verifiers and their panel",
    "forge_vllm": "vLLM as an engine",
    "forge_weaver": "Weaver",
}
ROOTED = "\n    options: {show_root_heading: true, show_root_toc_entry: true}\n"
FRONT = ("train", "sft", "dpo", "evaluate", "generate", "Result")
# Guides come before the API in the results of a search, and answers to symptoms before both.
BOOSTS = {"resume.md": 4.0, "troubleshooting.md": 2.0, "start/from_torchforge.md": 0.5}
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?:src|apps|benchmarks|tests|scripts)(?:/[\w./-]*)?)\)")


class Brackets(griffe.Extension):
    """Shapes in docstrings, such as [groups][samples], are text and no cross-references."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("][", "]\N{ZERO WIDTH SPACE}[")


def on_config(config: Any) -> Any:
    """Complete the navigation with the pages that are made."""
    tutorials = [{title: f"tutorials/{path.stem}.md"} for path, title in _tutorials()]
    api = [{name: f"{name}.md"} for name in MODULES]
    made = {"Tutorials": ["tutorials/index.md", *tutorials], "API": ["reference/api.md", *api]}
    for tab in config["nav"]:
        for pages in tab.values() if isinstance(tab, dict) else []:
            for page in pages if isinstance(pages, list) else []:
                if isinstance(page, dict):
                    page.update({title: made[title] for title in page.keys() & made.keys()})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from other files."""
    pages = {f"{name}.md": _api(name) for name in MODULES}
    rows = "\n".join(f"| [`{name}`](../{name}.md) | {about} |" for name, about in MODULES.items())
    pages["reference/api.md"] = (
        "# API reference\n\nEvery public name, with its types, from the docstrings.\n\n"
        f"| module | contents |\n|---|---|\n{rows}\n"
    )
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    pages["reference/glossary.md"] = "# Glossary\n" + contributing.split("## Glossary\n")[1].split("\n## ")[0]
    changelog = ROOT / "CHANGELOG.md"
    pages["reference/changelog.md"] = (
        changelog.read_text().replace("](docs/", "](../")
        if changelog.exists()
        else "# Changelog\n\nNo version has been released yet.\n"
    )
    tutorials = list(_tutorials())
    listed = "\n".join(f"- [{title}]({path.stem}.md)" for path, title in tutorials)
    pages["tutorials/index.md"] = (
        "# Tutorials\n\nEach tutorial is a notebook that runs on a CPU. Its source is `tutorials/NAME.py`, which "
        f"jupytext opens as a notebook.\n\n{listed or 'There are none in this checkout.'}\n"
    )
    for path, _ in tutorials:
        text, images = _tutorial(path)
        pages[f"tutorials/{path.stem}.md"] = text
        for name, data in images.items():
            files.append(File.generated(config, f"tutorials/{name}", content=data))
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to source files become their names, and diagrams part of the page."""

    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri, 0.4 if page.file.src_uri[:-3] in MODULES else 1.0)}

    def source(match: re.Match[str]) -> str:
        text, path = match.groups()
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri} links to {path}, which does not exist")
        return f"`{path}`" if text.strip("`/") == path.strip("/") else f"{text} (`{path}`)"

    def diagram(match: re.Match[str]) -> str:
        alt, name = match.groups()
        svg = (ROOT / "docs/diagrams" / name).read_text().replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)
        svg = re.sub(r"\n\s*\n", "\n", svg.strip())  # a blank line would end the HTML block
        return f'<figure class="diagram">\n{svg}\n</figure>'

    def titled(match: re.Match[str]) -> str:
        """A link that shows the name of a file shows the title of its page."""
        path = (ROOT / "docs" / page.file.src_uri).parent / match[1]
        title = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
        return f"[{title[1]}]({match[1]}" if title else match[0]

    markdown = re.sub(r"\[[\w/]+\.md\]\(([\w/.]+\.md)", titled, OUTSIDE.sub(source, markdown))
    markdown = re.sub(r"!\[([^\]]*)\]\([./]*diagrams/([\w-]+\.svg)\)", diagram, markdown)
    # GitHub needs \| in the code of a table, Python-Markdown shows the backslash.
    code = re.compile(r"`[^`\n]*`")
    lines = [
        code.sub(lambda found: found.group().replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    ]
    return "\n".join(lines)


def on_post_build(config: Any) -> None:
    """Every public name has an entry in the API reference."""
    data = (Path(config["site_dir"]) / "objects.inv").read_bytes()
    listed = {line.split(" ")[0] for line in zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()}
    missing = [
        f"{module}.{name}"
        for module in MODULES
        for name in _public(module)
        if module != "forge.losses"
        if not listed & {f"{module}.{name}", f"{module}.{name}.{name}"}
    ]
    if missing:
        raise PluginError(f"no entry in the API reference for {', '.join(missing)}")


def _file(module: str) -> Path:
    """The file of a module or package."""
    path = ROOT / "src" / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _public(module: str) -> list[str]:
    """The names in `__all__` as far as they are written out."""
    if not _file(module).exists():
        return []
    for node in ast.parse(_file(module).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [e.value for e in node.value.elts if isinstance(e, ast.Constant)]
    return []


def _renamed(module: str) -> list[tuple[str, str]]:
    """`name = algorithms.Name` at the top of a module."""
    return [
        (node.targets[0].id, node.value.attr)
        for node in ast.parse(_file(module).read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.targets[0], ast.Name)
    ]


def _api(module: str) -> str:
    """The page of a module: its public names, or its modules where it names none."""
    head = f"# `{module}`\n\n{MODULES[module]}.\n\n"
    if module == "forge":  # its names are imported on first use
        return head + "\n".join(f"::: forge.recipes.api.{name}{ROOTED}" for name in FRONT)
    if module == "forge.losses":
        rows = "\n".join(f"| `{old}` | [`{new}`][forge.algorithms.{new}] |" for old, new in _renamed(module))
        return f"{head}| name | class of `forge.algorithms` |\n|---|---|\n{rows}\n"
    if _public(module) or _file(module).name != "__init__.py":
        # Griffe takes a function that has the name of its file for the file.
        hidden = [
            f"::: {module}.{name}.{name}{ROOTED}" for name in _public(module) if _file(f"{module}.{name}").is_file()
        ]
        return head + "\n".join([f"::: {module}\n", *hidden])
    folder = _file(module).parent if _file(module).exists() else ROOT / "src" / module.replace(".", "/")
    names = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in sorted(folder.glob("*.py"))]
    names += [f"{module}.{path.name}" for path in sorted(folder.iterdir()) if (path / "__init__.py").exists()]
    names = [name for name in names if name not in MODULES]
    return head + "\n".join(
        f"## `{name}`\n\n::: {name}{_own(name)}\n" for name in names if not name.split(".")[-1].startswith("_")
    )


def _own(module: str) -> str:
    """The option that omits what a module imports by a wildcard: its entries are on the page of the other module."""
    tree = ast.parse(_file(module).read_text())
    if not any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body):
        return ""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    return f"\n    options: {{members: [{', '.join(names)}]}}\n"


def _tutorials() -> list[tuple[Path, str]]:
    """The sources in order, each with its title: the first heading."""
    found = []
    for path in sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.py")):
        title = re.search(r"^# # (.+)$", path.read_text(), re.MULTILINE)
        found.append((path, title[1].strip() if title else path.stem[3:].replace("_", " ").capitalize()))
    return found


def _tutorial(path: Path) -> tuple[str, dict[str, bytes]]:
    """The page of a tutorial and its images: from the executed notebook where there is one, else from the source."""
    notebook, images = ROOT / "build/tutorials" / f"{path.stem}.ipynb", {}
    if not notebook.exists():
        return "\n\n".join(_cell(*cell) for cell in _cells(path.read_text())), images
    parts = []
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        parts.append(_cell(cell["cell_type"], "".join(cell["source"])))
        printed = ""
        for place, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if output.get("name") == "stderr":  # of the log, what a reader follows
                text = "".join(line + "\n" for line in text.splitlines() if re.match("step |alert|held-out", line))
            of_start = r"^(memory: |checking model|starting the processes|in the first step|Monarch).*\n"
            text = re.sub(of_start, "", text, flags=re.MULTILINE)
            if "image/png" in data:
                name = f"{path.stem}_{number}_{place}.png"
                images[name] = base64.b64decode("".join(data["image/png"]))
                parts += [_printed(printed), f"![output]({name})"]
                printed = ""
            elif text:
                printed += text if text.endswith("\n") else text + "\n"
        parts.append(_printed(printed))
    return "\n\n".join(parts), images


def _cells(source: str) -> list[tuple[str, str]]:
    """Kind and text of each cell of a jupytext source in the percent format."""
    cells = []
    body = re.sub(r"\A(# ---\n.*?# ---\n)", "", source, flags=re.DOTALL)
    for mark, text in re.findall(r"^# %%(.*)\n(.*?)(?=^# %%|\Z)", body, re.DOTALL | re.MULTILINE):
        if "[markdown]" in mark:
            cells.append(("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip()))
        elif text.strip():
            cells.append(("code", text.strip()))
    return cells


def _cell(kind: str, text: str) -> str:
    return text if kind == "markdown" else f"```python\n{text}\n```"


def _printed(text: str) -> str:
    return f"```{{ .text .output }}\n{text.rstrip()}\n```" if text.strip() else ""
