"""Algorithms by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from .algorithm import TENSORS, Algorithm, OwnLoss
from .cispo import CISPOLoss
from .dapo import DAPOLoss
from .decoupled import DecoupledPPOLoss
from .distill import DistillLoss
from .dr_grpo import DrGRPOLoss
from .grpo import GRPOLoss
from .gspo import GSPOLoss
from .ppo import PPOLoss
from .reinforce_loss import ReinforceLoss
from .reinforce_pp import ReinforcePlusPlusLoss
from .rloo import RLOOLoss
from .sapo import SAPOLoss

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPOLoss,
    "dr_grpo": DrGRPOLoss,
    "dapo": DAPOLoss,
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "sapo": SAPOLoss,
    "rloo": RLOOLoss,
    "reinforce": ReinforceLoss,
    "reinforce++": ReinforcePlusPlusLoss,
    "ppo": PPOLoss,
    "decoupled_ppo": DecoupledPPOLoss,
    "distill": DistillLoss,
}


def load_algorithm(name: str, **settings: Any) -> Algorithm:
    """An algorithm of this library by name, or `package.module:Name` of your own: a class derived from `Algorithm`, or
    a plain function over named tensors, which gets GRPO's advantages.

    Args:
        settings: of its constructor, or further arguments of the function.

    Raises:
        ValueError: nothing of this name; a setting that it does not have, or refuses.
    """
    found: Callable[..., Any] = ALGORITHMS[name] if name in ALGORITHMS else _own(name)
    known = _settings(found)
    for setting in settings:
        if setting not in known:
            near = difflib.get_close_matches(setting, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"algorithm {name} has no setting {setting!r}: {hint}")
    if not inspect.isclass(found):
        missing = [p.name for p in _arguments(found) if p.default is p.empty and p.name not in settings]
        if missing:
            raise ValueError(
                f"algorithm {name} needs {missing[0]!r}, which is no tensor of a batch: set it in grpo.loss"
            )
        return OwnLoss(found, **settings)
    try:
        made = found(**settings)
    except TypeError as error:
        raise ValueError(f"algorithm {name}: {error}") from error
    if not isinstance(made, Algorithm):
        raise ValueError(f"algorithm {name} is no forge.losses.Algorithm: derive it from that, or write a function")
    return made


def _own(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(ALGORITHMS)}"
        raise ValueError(f"unknown algorithm {name!r}: {hint}; your own is written package.module:Name")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"algorithm {name!r} was not found ({error}); write package.module:Name") from error
    if not callable(found):
        raise ValueError(f"algorithm {name!r} is neither a class nor a function")
    return found


def _settings(found: Callable[..., Any]) -> list[str]:
    """Names of settings: of every constructor that a class passes `**more` on to, or of a function."""
    if not inspect.isclass(found):
        return [p.name for p in _arguments(found)]
    names: dict[str, None] = {}
    for cls in found.__mro__:
        if cls is Algorithm:
            break
        if "__init__" not in vars(cls):
            continue
        parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
        names |= {p.name: None for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def _arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a function takes besides tensors."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.name not in TENSORS and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
