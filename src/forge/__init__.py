"""RL post-training of language models on PyTorch and Monarch.

    import forge
    result = forge.train("Qwen/Qwen3-0.6B", dataset="openai/gsm8k", reward=my_reward, algorithm="dapo", steps=200)

Importing this package imports nothing heavy; each part is imported where it is used (`forge.losses`,
`forge.runtime.controller`, ...).
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .system import aliases

aliases.install()

# Imported on first use, from these modules.
_HOMES = {
    **dict.fromkeys(("train", "sft", "dpo", "evaluate", "generate", "Result"), "forge.recipes.api"),
    "log": "forge.recipes.hooks",
    **dict.fromkeys(("Completion", "Episode", "Group", "Prompt", "Sample"), "forge.types"),
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
