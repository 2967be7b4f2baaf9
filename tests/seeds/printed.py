"""Blocks of the torchforge documents. They lie next to the checkout; one of them was stored without its indentation."""

import re
from pathlib import Path
from typing import Any

from forge.config import keys_of, section_in
from forge.recipes.rl_config import RLConfig

FOLDER = Path(__file__).parents[3] / "shared" / "seeds"
BLOG, FRONT, SKILL, TALK = "000", "001", "002", "003"
MISSING = not FOLDER.is_dir()


def document(name: str) -> list[str]:
    """The lines of the document whose file begins with this number."""
    (path,) = FOLDER.glob(f"{name}_*.txt")
    return path.read_text().splitlines()


def block(name: str, first: str, last: str, occurrence: int = 0) -> list[str]:
    """The lines from one that contains `first` to the next one that contains `last`."""
    lines = document(name)
    start = [number for number, line in enumerate(lines) if first in line][occurrence]
    end = next(number for number in range(start, len(lines)) if last in lines[number])
    return lines[start : end + 1]


def python(lines: list[str]) -> str:
    """Python whose indentation was lost: a class holds functions, an `if` holds what leads to its return."""
    code, in_class, level, bracket = [], False, 0, 0
    for line in lines:
        text = line.strip()
        if bracket == 0:
            if text.startswith(("class ", "import ", "from ", "# src", "# apps", "# rewards")):
                in_class, level = text.startswith("class "), 0
            elif text.startswith("def "):
                level = int(in_class)
        code.append("    " * (level + (bracket > 0)) + text)
        bare = re.sub(r"""(['"]).*?\1""", "", text)
        bracket += sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))
        if bracket == 0 and text.split("#")[0].rstrip().endswith(":"):
            level += 1
        elif bracket == 0 and text.startswith("return") and level > 1 + in_class:
            level -= 1
    return "\n".join(code) + "\n"


def yaml(lines: list[str]) -> str:
    """YAML whose indentation was lost: a key belongs to the innermost open section that has it."""
    code: list[str] = []
    stack: list[Any] = [RLConfig]
    for line in lines:
        key = line.split(":")[0].strip()
        if line.lstrip().startswith("#"):
            continue
        if any(key in keys_of(section) for section in stack):  # else it is a setting of an algorithm
            while key not in keys_of(stack[-1]):
                stack.pop()
        code.append("  " * (len(stack) - 1) + line.strip())
        if line.split("#")[0].rstrip().endswith(":"):
            stack.append(section_in(keys_of(stack[-1])[key].annotation))
    return "\n".join(code) + "\n"


def run(code: str, **names: Any) -> dict[str, Any]:
    """Execute code with these names; returns all names afterwards."""
    exec(compile(code, "document", "exec"), names)
    return names
