"""Algorithms by name, and user-defined losses as algorithms."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from ..config.plugin import construct, nearest_setting, resolve
from .base import TENSORS, Algorithm, OwnLoss
from .cispo import CISPO
from .dapo import DAPO
from .decoupled_ppo import DecoupledPPO
from .distill import Distill
from .dr_grpo import DrGRPO
from .dro import DRO
from .grpo import GRPO
from .gspo import GSPO
from .ppo import PPO
from .reinforce import Reinforce
from .reinforce_plus_plus import ReinforcePlusPlus
from .rloo import RLOO
from .sapo import SAPO

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "dro": DRO,
    "sapo": SAPO,
    "rloo": RLOO,
    "reinforce": Reinforce,
    "reinforce++": ReinforcePlusPlus,
    "ppo": PPO,
    "decoupled_ppo": DecoupledPPO,
    "distill": Distill,
}


def load_algorithm(algorithm: Any, *, known: Iterable[str] = (), **settings: Any) -> Algorithm:
    """Return an algorithm of this library by name, or one of your own, by `package.module:Name` or as an object.

    Your own is an `Algorithm` (class or instance), an `nn.Module` (class or instance) or a function over named tensors,
    see `forge.algorithms`. A module or function is a loss only, and gets GRPO's advantages.

    Args:
        known: other keys of the section that has the settings, which a hint at a misspelt one may propose.
        settings: fields of the algorithm, arguments of the module's constructor, or arguments of the function that are
            not tensors.

    Raises:
        ValueError: the name is unknown, a setting is unknown or missing, or a value is out of its range.
    """
    subject = f"algorithm {algorithm}" if isinstance(algorithm, str) else "algorithm"

    # A name of this library, or a path to an object elsewhere.
    if isinstance(algorithm, str) and algorithm not in ALGORITHMS and ":" not in algorithm:
        similar = difflib.get_close_matches(algorithm, ALGORITHMS, n=1, cutoff=0.5)
        hint = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(ALGORITHMS)}"
        raise ValueError(f"unknown algorithm {algorithm!r}: {hint}; write a custom algorithm as package.module:Name")

    target: Any = algorithm
    if isinstance(algorithm, str):
        target = ALGORITHMS[algorithm] if algorithm in ALGORITHMS else resolve(algorithm, "algorithm")
    if not callable(target):
        raise ValueError(f"algorithm {algorithm!r} must be a class or a function")

    # A class is constructed with the settings; it must have all of them.
    if inspect.isclass(target):
        settable = [*vars(target).get("__dataclass_fields__", settings)]
        for name in settings:
            if name not in settable:
                # A setting that other algorithms have is rarely a typing error.
                owners = ", ".join(owner for owner in ALGORITHMS if name in setting_names(owner))
                fix = f": it is one of {owners}; omit it, or set grpo.{name} to null where a file sets it"
                hint = fix if owners else nearest_setting(name, [*settable, *known])
                raise ValueError(f"{subject} has no setting {name!r}{hint}")
        target = construct(target, settings, "grpo", known)
        settings = {}

    if isinstance(target, Algorithm):
        if settings:
            raise ValueError(
                f"{subject} is an object, whose settings cannot be changed here: omit {', '.join(settings)}"
            )
        if unknown := [name for name in target.further if name not in TENSORS]:
            raise ValueError(
                f"{subject}: token_loss has the parameter {unknown[0]!r}, which is not a tensor of a batch; available "
                f"are {', '.join(TENSORS)}"
            )
        return target

    # A function: parameters that are not tensors of a batch are its settings.
    call = getattr(target, "forward", target)
    if not callable(call):
        raise ValueError(f"{subject} is not callable: it must be a function of batch tensors, or an Algorithm")

    parameters = [
        p for p in inspect.signature(call).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    arguments = [p for p in parameters if p.name not in TENSORS]
    if unknown := [name for name in settings if name not in {p.name for p in arguments}]:
        names = ", ".join(p.name for p in arguments) or "none"
        raise ValueError(f"{subject} has no setting {unknown[0]!r}: its settings are {names}")

    if missing := [p.name for p in arguments if p.default is p.empty and p.name not in settings]:
        raise ValueError(
            f"{subject} needs {missing[0]!r}, which is neither set under grpo nor a tensor of a batch "
            f"({', '.join(TENSORS)}): set it, or rename the parameter"
        )

    if len(arguments) == len(parameters):
        raise ValueError(
            f"{subject} has no parameter that is a tensor of a batch: name its parameters after tensors, such as "
            f"{', '.join(TENSORS[:6])}, ..."
        )
    return OwnLoss(target, settings)


def setting_names(algorithm: Any) -> frozenset[str]:
    """Return the names of an algorithm's settings; of a function also the names of its tensors.

    They are empty if there is no algorithm of this name.
    """
    target = algorithm
    if isinstance(algorithm, str):
        try:
            target = ALGORITHMS[algorithm] if algorithm in ALGORITHMS else resolve(algorithm, "algorithm")
        except ValueError:
            return frozenset()

    if inspect.isclass(target) and "__dataclass_fields__" in vars(target):
        return frozenset(vars(target)["__dataclass_fields__"])
    return frozenset(inspect.signature(target).parameters) if callable(target) else frozenset()
