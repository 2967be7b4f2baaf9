"""What the reference pages quote exists: error messages, papers, configurations of papers, diagrams."""

import ast
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from forge.config import build
from forge.config.yaml_files import Loader
from forge.recipes.rl_config import RLConfig
from scripts.describe_metrics import SCRIPT, descriptions, script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TROUBLES = (DOCS / "troubleshooting.md").read_text()
PAPERS = (DOCS / "algorithms.md").read_text().split("## Papers")[1]
MESSAGES = re.findall(r"^\| `(.+?)` \|", TROUBLES.split("## By error message")[1], re.MULTILINE)
DIAGRAMS = sorted((DOCS / "diagrams").glob("*.svg"))


def literals() -> str:
    """All texts of the sources, one a line; what an f-string fills in is …"""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ConfigRule"
            ):  # of forge.recipes.preflight
                found.append(": ".join(text_of(part) for part in node.args[1:]))
            elif isinstance(node, ast.expr):
                found.append(text_of(node))
    return "\n".join(found)


def text_of(node: ast.expr) -> str:
    """The text of a literal, of an f-string, or of a function that returns one; otherwise none."""
    if isinstance(node, ast.Lambda):
        return text_of(node.body)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


TEXTS = literals()


@pytest.mark.parametrize("message", MESSAGES)
def test_documented_error_messages_occur_in_source(message):
    # What stands for names and numbers may be several parts of the source's text.
    pattern = "[^\n]*".join(re.escape(part) for part in message.split("…"))
    assert re.search(pattern, TEXTS), message


def test_papers_cited_in_source_are_listed_in_docs():
    cited = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                text = " ".join(text.split())
                cited |= set(re.findall(r"([A-Z][a-z]+(?:-[A-Z][a-z]+)?) et al\.,? (\d{4})", text))
                cited |= set(re.findall(r"\(([A-Z][a-z]+),? (\d{4})", text))
    assert len(cited) > 30
    listed = " ".join(PAPERS.split())
    missing = {(name, year) for name, year in cited if not re.search(rf"{name}\b.{{0,40}}?\b{year}", listed)}
    assert not missing


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAPERS, re.DOTALL))
def test_documented_configs_of_papers_are_valid(text):
    needed = {"model": "m", "dataset": {"path": "rows.jsonl"}, "run": {"name": "x"}, "eval": {"problems": 0}}
    assert build(RLConfig, needed | yaml.load(text, Loader=Loader)).load_algorithm()


def test_every_recorded_metric_is_described_in_docs():
    described = set(re.findall(r"`([\w/]+)`", (DOCS / "reference.md").read_text()))
    recorded = set()
    for path in (ROOT / "src").rglob("*.py"):
        recorded |= set(re.findall(r'record_metric\(f?"([^"]*)"', path.read_text()))
    assert len(recorded) > 20
    missing = {name for name in recorded if re.sub(r"{.*}", "NAME", name) not in described}
    # Each way in which an episode ends has a row.
    assert missing <= {"episode/{stop}"}


def test_watch_page_metric_descriptions_match_reference():
    page = (DOCS / "reference.md").read_text()
    assert descriptions(page)["train/entropy"] == "train/entropy: of the policy at trained tokens, in nats"
    assert SCRIPT.read_text() == script(page), "run scripts/describe_metrics.py"


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.name)
def test_documentation_diagrams_are_small_self_contained_and_used(path):
    root = ElementTree.parse(path).getroot()
    assert float(root.get("viewBox").split()[2]) <= 380, "wider than a narrow screen"
    assert root.find("{*}title") is not None
    assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert any(f"diagrams/{path.name})" in page.read_text() for page in DOCS.rglob("*.md"))
