"""interrogate, which counts an `async def` inside a function as nested too: version 1.7 does so for `def` alone.

python scripts/check_docstrings.py src            # settings are in pyproject.toml
"""

from interrogate import cli, visit

FUNCTIONS = ("FunctionDef", "AsyncFunctionDef")


def is_nested(self: visit.CoverageVisitor, parent: visit.CovNode | None, node_type: str) -> bool:
    """Whether a function is inside another function; a method of a class is not."""
    return parent is not None and parent.node_type in FUNCTIONS and node_type in FUNCTIONS


if __name__ == "__main__":
    visit.CoverageVisitor._is_nested_func = is_nested
    cli.main()
