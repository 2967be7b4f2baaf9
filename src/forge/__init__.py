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
    if name == "__version__":  # of the installed package, whose number is in pyproject.toml
        try:
            return version("torchforge-rl")
        except PackageNotFoundError:  # a checkout on Python's path that was never installed
            return "0+unknown"
    raise AttributeError(f"module 'forge' has no attribute {name!r}")


class _Finder:
    """Import hook that lets other packages provide modules which this one does not have.

    `forge_compat`, for example, provides torchforge's `forge.controller` as an alias of `forge.runtime.controller`.
    """

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a module below `forge`, and None for any other module.

        The files of this package come first, then the entry points of the group `forge.modules`: functions from a
        module's full name to its specification, or to None.
        """
        parent = fullname.rpartition(".")[0]
        if parent.partition(".")[0] != __name__:
            return None

        # A module within an alias is an alias as well. The other finders would load its file a second time.
        is_in_alias = sys.modules[parent].__name__ != parent
        own_specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not _Finder)
        if not is_in_alias and (own_spec := next(filter(None, own_specs), None)) is not None:
            return own_spec
        alias_specs = (point.load()(fullname) for point in entry_points(group="forge.modules"))
        return next(filter(None, alias_specs), None)


if not any(getattr(finder, "__qualname__", "") == _Finder.__qualname__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
