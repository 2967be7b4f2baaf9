"""Holds one phase of a run open, in whichever process it happens: for tests that send signals in it.

Python finds it in every process of the run, through PYTHONPATH. HOLD names the phase, MARK a file that appears once it
has begun.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from pathlib import Path

PLACES = {
    "imports": ("forge.recipes.rl", None, None),
    "start-up": ("forge.runtime.forking.forkserver", "ForkServer", "wait"),
    "first step": ("forge.actors.trainer", "Trainer", "train_step"),
    "checkpoint": ("forge.training.checkpoint", None, "save_checkpoint"),
    "export": ("forge.training.checkpoint", None, "export_model"),
    "report": ("forge_inspect.watch.report", None, "write_report"),
}


def hold() -> None:
    mark = Path(os.environ["MARK"])
    if not mark.exists():
        mark.touch()
        time.sleep(4)


class Loader(importlib.abc.Loader):
    def __init__(self, loader, owner, name) -> None:
        self.loader, self.owner, self.name = loader, owner, name

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        if self.name is None:
            hold()
        self.loader.exec_module(module)
        if self.name is None:
            return
        owner = module if self.owner is None else getattr(module, self.owner)
        original = getattr(owner, self.name)
        call = original.fget if isinstance(original, property) else original

        @functools.wraps(call)
        def held(*args, **kwargs):
            hold()
            return call(*args, **kwargs)

        setattr(owner, self.name, property(held) if isinstance(original, property) else held)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        place, owner, attribute = PLACES[os.environ["HOLD"]]
        if name != place:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader, owner, attribute)
        return spec


if os.environ.get("HOLD"):
    sys.meta_path.insert(0, Finder())
