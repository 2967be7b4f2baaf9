"""Names of Meta's torchforge, and older ones of this package: `forge.controller` is `forge.runtime.controller`.

`forge` asks `find` for a module that it does not have, by the entry point `forge.modules`.
"""

from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# Current names of modules by their other names. A name also stands for all modules in the package; of several that fit
# the longest is used.
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

# Modules of Meta's torchforge that are not here, and the modules that have their contents.
ABSENT = {
    "forge.actors.coder": "forge_sandbox",
    "forge.env": "forge.observability, which reads no variables",
    "forge.rl": "forge.types, forge.data.packing and forge.training.credit",
    "forge.data.datasets": "forge.data.load.load_data",
}


def current_name(name: str) -> str | None:
    """Return the current name of a module by another name of it; None if `name` is no such name.

    >>> current_name("forge.controller.actor")
    'forge.runtime.controller.actor'
    """
    fitting = [old for old in ALIASES if name == old or name.startswith(f"{old}.")]
    if not fitting:
        return None
    longest = max(fitting, key=len)
    return ALIASES[longest] + name.removeprefix(longest)


def find(name: str) -> ModuleSpec | None:
    """Return the import specification of a module by another name of it; None if `name` is no such name.

    Raises:
        ModuleNotFoundError: it is a module of torchforge that is not here; the message names where its contents are.
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
    """Loads a module under another name, as the same object, so that its classes exist only once."""

    def __init__(self, current: str) -> None:
        self._current = current
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, imported under its current name."""
        module = import_module(self._current)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's specification, which the import system has replaced by the other module's."""
        module.__spec__ = self._spec

    def get_source(self, fullname: str) -> str:
        """Return the source for `python -m`, which runs the module by its current name, as its imports are relative."""
        return f"import runpy\nrunpy.run_module({self._current!r}, run_name='__main__', alter_sys=True)\n"
