"""Names of Meta's torchforge, and older ones of this package: `forge.controller` is `forge.runtime.controller`.

`forge` asks `find` for a module that it does not have, by the entry point `forge.modules`.
"""

from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# A name also holds for all modules in the package. Of those that fit the longest counts.
ALIASES = {
    "forge.api": "forge.recipes.api",
    "forge.cluster": "forge_cluster",
    "forge.controller": "forge.runtime.controller",
    "forge.data.tokenizer": "forge.models.tokenizer",
    "forge.data.rewards": "forge.rewards.rules",
    "forge.store": "forge_compat.store",
    "forge.verifiers": "forge_verifiers",
    "forge.watch": "forge_inspect.watch",
    "forge.actors.reference_model": "forge.actors.reference",
    "forge.controller.provisioner": "forge_compat.launcher",
    "forge.data_models": "forge.types",
    "forge.data_models.completion": "forge.types",
    "forge.data_models.prompt": "forge.types",
    "forge.losses.grpo_loss": "forge.losses",
    "forge.observability.metric_actors": "forge_compat.upstream.metric_actors",
    "forge.observability.perf_tracker": "forge_compat.upstream.perf_tracker",
    **{
        f"forge.util{module}": "forge_compat.upstream" for module in ("", ".config", ".distributed", ".logging", ".ops")
    },
}

# Modules of Meta's torchforge that are not here, and what has their contents.
ABSENT = {
    "forge.actors.coder": "forge_sandbox",
    "forge.env": "forge.observability, which reads no variables",
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


def find(name: str) -> ModuleSpec | None:
    """Return the specification of a module by another name; None: there is none.

    Raises:
        ModuleNotFoundError: torchforge has it; names what has its contents here.
    """
    if name in ABSENT:
        raise ModuleNotFoundError(
            f"{name} is a module of Meta's torchforge; here: {ABSENT[name]} (docs/start/from_torchforge.md)", name=name
        )
    current = current_name(name)
    spec = None if current is None else find_spec(current)
    if current is None or spec is None:
        return None
    return ModuleSpec(name, Alias(current), is_package=spec.submodule_search_locations is not None)


class Alias(InspectLoader):
    """Loads a module under another name. It is the same object, so that its classes exist once."""

    def __init__(self, current: str) -> None:
        self._current = current
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, imported under its current name."""
        module = import_module(self._current)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's specification, which the import system has replaced by the alias's."""
        module.__spec__ = self._spec

    def get_source(self, fullname: str) -> str:
        """Return the program that `python -m` runs: the module under its current name, for its relative imports."""
        return f"import runpy\nrunpy.run_module({self._current!r}, run_name='__main__', alter_sys=True)\n"
