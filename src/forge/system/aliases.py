"""Older names of packages, which import the same modules: `forge.controller` is `forge.runtime.controller`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

# An older name also holds for all modules in the package. Of those that fit the longest counts. The second half are
# names of Meta's torchforge.
ALIASES = {
    "forge.api": "forge.recipes.api",
    "forge.cluster": "forge.runtime.cluster",
    "forge.controller": "forge.runtime.controller",
    "forge.data.tokenizer": "forge.models.tokenizer",
    "forge.data.rewards": "forge.rewards.rules",
    "forge.store": "forge.runtime.store",
    "forge.verifiers": "forge.rewards",
    "forge.watch": "forge_inspect.watch",
    "forge.actors.reference_model": "forge.actors.reference",
    "forge.data_models": "forge.types",
    "forge.data_models.completion": "forge.types",
    "forge.data_models.prompt": "forge.types",
    "forge.losses.grpo_loss": "forge.losses",
    "forge.observability.metric_actors": "forge.actors.upstream.metric_actors",
    "forge.observability.perf_tracker": "forge.actors.upstream.perf_tracker",
    "forge.env": "forge.actors.upstream.env",
    "forge.store.api": "forge.runtime.store.calls",
    "forge.store.logging": "forge.runtime.store.calls",
    "forge.store.strategy": "forge.runtime.store.strategies",
    "forge.store.transport": "forge.runtime.store",
    "forge.store.transport.types": "forge.runtime.store",
    "forge.store.utils": "forge.actors.upstream.torchstore",
    "forge.util": "forge.actors.upstream",
}

# Modules of Meta's torchforge that are not here, and what has their contents.
ABSENT = {
    "forge.actors.coder": "forge_sandbox",
    "forge.rl": "forge.types, forge.data.packing and forge.training.credit",
    "forge.data.datasets": "forge.data.load.load_data",
}


def current_name(name: str) -> str | None:
    """Return the current name of a module, if `name` is an older one."""
    # A module may have another home than its package.
    fitting = [old for old in ALIASES if name == old or name.startswith(f"{old}.")]
    if not fitting:
        return None
    longest = max(fitting, key=len)
    return ALIASES[longest] + name.removeprefix(longest)


class AliasFinder(MetaPathFinder, InspectLoader):
    """Finds a module under an older name. It is the same object, so that its classes exist once."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of an alias; None leaves the name to the other finders."""
        name = current_name(fullname)
        if name is None or find_spec(name) is None:
            return None
        return ModuleSpec(fullname, self, is_package=self.is_package(fullname))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, imported under its current name."""
        module = import_module(str(current_name(spec.name)))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's specification, which the import system has replaced by the alias's."""
        alias = module.__spec__
        assert alias is not None
        module.__spec__ = self._specs.pop(alias.name)

    def is_package(self, fullname: str) -> bool:
        """Whether the module contains other modules."""
        spec = find_spec(str(current_name(fullname)))
        return spec is not None and spec.submodule_search_locations is not None

    def get_source(self, fullname: str) -> str:
        """Return the program that `python -m` runs: the module under its current name, for its relative imports."""
        return f"import runpy\nrunpy.run_module({current_name(fullname)!r}, run_name='__main__', alter_sys=True)\n"

    def get_code(self, fullname: str) -> CodeType:
        """Return `get_source`, compiled."""
        return compile(self.get_source(fullname), f"<{fullname}>", "exec")


class AbsentFinder(MetaPathFinder):
    """Says what has the contents of a module that upstream has, once no other finder knows it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None. ModuleNotFoundError: it is one of them; names the module of today."""
        # Last of all finders: a module of this name that exists is found before.
        if fullname in ABSENT:
            here = ABSENT[fullname]
            raise ModuleNotFoundError(
                f"{fullname} is a module of Meta's torchforge; here: {here} (docs/howto/from_torchforge.md)",
                name=fullname,
            )
        return None


def install() -> None:
    """Make the older names importable, once."""
    if not any(isinstance(finder, AbsentFinder) for finder in sys.meta_path):
        sys.meta_path.append(AbsentFinder())
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())  # before the finder of files: an old folder may remain
