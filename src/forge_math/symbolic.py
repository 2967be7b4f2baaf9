"""Symbolic equality of two trees, in a helper process that runs `sympy_equal`."""

from pathlib import Path

from forge.rewards.rules.comparison import Helper

from .expressions import Tree

# Bounds of an answer, far larger than any form of the target that a person would write.
MAX_SURPLUS = 120  # nodes in addition to four times those of the target
MAX_DEPTH = 24  # nested operations
helper = Helper(Path(__file__).with_name("sympy_equal.py"))


def are_equivalent(kind: str, answer: Tree, target: Tree, tolerance: float) -> bool | None:
    """Return whether two trees of `expressions` are equal, by their values at several points.

    None if the target takes longer than the helper's CPU time even to be compared with itself. Answers that are not
    proven equal in that time, or exceed MAX_SURPLUS or MAX_DEPTH, are not equal.

    Args:
        kind: "expression"; or "equation" or "inequality" if the trees are differences of two sides, which are then
            equal if they differ by a factor only.
        tolerance: used if one of the trees has a decimal point.

    Raises:
        RuntimeError: the helper process does not run.
    """
    size, depth = _tree_size(answer)
    target_size, target_depth = _tree_size(target)
    if size > 4 * target_size + MAX_SURPLUS or depth > max(MAX_DEPTH, target_depth):
        return False
    return helper.verdict([kind, answer, target, tolerance], [kind, target, target, tolerance])


def _tree_size(tree: Tree) -> tuple[int, int]:
    """Return the number of nodes of a tree, and its depth."""
    sizes = [_tree_size(argument) for argument in tree[1:] if isinstance(argument, list)]
    return 1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
