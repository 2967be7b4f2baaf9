"""Names of Meta's torchforge, and older ones of this package: `forge.controller` is `forge.runtime.controller`.

`forge` asks `find` for a module that it does not have, by the entry point `forge.modules`.
"""

from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from forge_compat.names import GUIDE, REPLACED, find_name

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
    **{
        f"forge.controller.service.{module}": "forge.runtime.controller.service"
        for module in ("interface", "metrics", "replica", "router", "service", "spawn")
    },
    "forge.data_models": "forge.types",
    "forge.data_models.completion": "forge.types",
    "forge.data_models.prompt": "forge.types",
    "forge.env": "forge_compat.upstream.env",
    "forge.losses.grpo_loss": "forge.losses",
    "forge.observability.metric_actors": "forge_compat.upstream.metric_actors",
    "forge.observability.perf_tracker": "forge_compat.upstream.perf_tracker",
    **{
        f"forge.util{module}": "forge_compat.upstream" for module in ("", ".config", ".distributed", ".logging", ".ops")
    },
}

# Modules of Meta's torchforge that are not here, and the modules that have their contents.
ABSENT = {
    "forge.actors._torchstore_utils": "weights are shared in memory by forge.runtime.store, without keys or handles",
    "forge.actors.coder": "forge_sandbox",
    "forge.controller.launcher": "forge launch slurm | kubernetes | ssh CONFIG, or a Monarch job as options(hosts=...)",
    "forge.data.collate": "forge.data.packing",
    "forge.data.datasets": "forge.data.load.load_data",
    "forge.data.metric_transform": "record_metric in a reward or an actor",
    "forge.data.utils": "forge.data.supervised, which masks and truncates",
    "forge.interfaces": "nothing has to be inherited; a reward is any function, an environment any class of forge.envs",
    "forge.observability.utils": "forge.runtime.controller.ActorContext, as self.context",
    "forge.rl": "forge.types, forge.data.packing and forge.training.credit",
    "forge.util._shared_tensor": "weights are shared in memory by forge.runtime.store",
}


def current_name(name: str) -> str | None:
    """Return the current name of a module for one of its old names; None if `name` is not an old name.

    >>> current_name("forge.controller.actor")
    'forge.runtime.controller.actor'
    """
    fitting = [old for old in ALIASES if name == old or name.startswith(f"{old}.")]
    if not fitting:
        return None
    longest = max(fitting, key=len)
    return ALIASES[longest] + name.removeprefix(longest)


def find(name: str) -> ModuleSpec | None:
    """Return the import specification of a module for one of its old names; None if `name` is not an old name.

    Raises:
        ModuleNotFoundError: it is a module of torchforge that is not here; the message names where its contents are.
    """
    # A module within an absent one, or a name that a package is asked for by `from package import name`.
    for absent in (name, name.rpartition(".")[0]):
        if absent in ABSENT:
            raise ModuleNotFoundError(
                f"{absent} is a module of Meta's torchforge that forge replaces by: {ABSENT[absent]} ({GUIDE})",
                name=name,
            )
    if name.rpartition(".")[2] in REPLACED:
        find_name(name.rpartition(".")[2])
    current = current_name(name)
    spec = None if current is None else find_spec(current)
    if current is None or spec is None:
        return None
    # torchforge has packages where here is one file: modules within them are aliases, too.
    is_package = spec.submodule_search_locations is not None or any(old.startswith(f"{name}.") for old in ALIASES)
    return ModuleSpec(name, Alias(current), is_package=is_package)


class Alias(InspectLoader):
    """Import loader of a module under another name, as the same object, so that its classes exist only once."""

    def __init__(self, current: str) -> None:
        self._current = current
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, imported under its current name."""
        module = import_module(self._current)
        # Names of torchforge that the module does not have are explained.
        vars(module).setdefault("__getattr__", find_name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's specification, which the import system has replaced by the other module's."""
        module.__spec__ = self._spec

    def get_source(self, fullname: str) -> str:
        """Return the source for `python -m`, which runs the module by its current name, as its imports are relative."""
        return f"import runpy\nrunpy.run_module({self._current!r}, run_name='__main__', alter_sys=True)\n"
