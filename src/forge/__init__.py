"""RL post-training of language models on PyTorch and Monarch.

    import forge
    result = forge.train("Qwen/Qwen3-0.6B", dataset="openai/gsm8k", reward=my_reward, algorithm="dapo", steps=200)

Importing this package imports nothing heavy; each part is imported where it is used (`forge.losses`,
`forge.runtime.controller`, ...).
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import ModuleType
from typing import Any

# Imported on first use, from these modules.
_HOMES = {
    **dict.fromkeys(("train", "sft", "dpo", "evaluate", "generate", "Result"), "forge.recipes.api"),
    "log": "forge.recipes.hooks",
    **dict.fromkeys(("Completion", "Episode", "Group", "Prompt", "Sample"), "forge.types"),
    "run": "forge.runtime.controller",
    "VersionStore": "forge.runtime.store",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "__version__":  # said in pyproject.toml
        try:
            return version("torchforge-rl")
        except PackageNotFoundError:  # a checkout on Python's path that was never installed
            return "0+unknown"
    raise AttributeError(f"module 'forge' has no attribute {name!r}")


class _Finder:
    """Asks other packages for a module of this one that does not exist, such as torchforge's `forge.controller`."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of the module here, or of the first package that has one."""
        parent = fullname.rpartition(".")[0]
        if parent.partition(".")[0] != __name__:
            return None
        # Modules within an alias are aliases as well: they must not be loaded a second time by their files.
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not _Finder)
        if sys.modules[parent].__name__ == parent and (spec := next(filter(None, specs), None)) is not None:
            return spec
        return next(
            (spec for point in entry_points(group="forge.modules") if (spec := point.load()(fullname)) is not None),
            None,
        )


if not any(getattr(finder, "__qualname__", "") == _Finder.__qualname__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
