"""A loss, and the tensors that it may ask for by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..types import Batch
from .heads import TokenValues
from .policy import TokenScores

Loss = Callable[..., Tensor]
Named = dict[str, Tensor | None]


def named_tensors(micro: Batch, output: TokenScores | TokenValues) -> Named:
    """What a loss may ask for by name, each [trained tokens of the micro-batch]; None where it is not there."""

    def trained(values: np.ndarray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values[micro.mask]).to(output[0].device)

    named: Named = {
        **output._asdict(),
        "ref_logprobs": trained(micro.ref_logprobs),
        "old_values": trained(micro.values),
        "returns": trained(micro.returns),
        "advantages": trained(micro.advantages),
        "weights": trained(micro.weights),
        "sequences": trained(np.repeat(np.arange(len(micro)), micro.lengths)),
        "padding_mask": torch.ones_like(output[0]),
    }
    if isinstance(output, TokenScores):
        behaviour = trained(micro.logprobs)
        proximal = trained(micro.proximal_logprobs)
        proximal = output.logprobs.detach() if proximal is None else proximal
        assert behaviour is not None
        named |= {
            "behaviour_logprobs": torch.where(behaviour.isnan(), proximal, behaviour),
            "proximal_logprobs": proximal,
        }
    return named


def weighted(loss: Loss, micro: Batch, named: Named, output: TokenScores | TokenValues) -> Tensor:
    """The micro-batch's part of the batch's loss.

    A loss that takes no `weights` has means of its own: it is given [sequences, width], padded on the right, and its
    value counts by the micro-batch's share of the batch. That is exact where its mean is the batch's aggregation.
    """
    if "weights" in _parameters(loss):
        return call_by_name(loss, named)
    if not len(output[0]):
        return output[0].sum()
    counts = [int(own.sum()) for own in np.split(micro.mask, np.cumsum(micro.lengths)[:-1])]
    padded = {
        name: None if values is None else pad_sequence(values.split(counts), batch_first=True)
        for name, values in named.items()
        if name != "sequences"
    }
    weights = named["weights"]
    assert weights is not None
    return call_by_name(loss, padded) * weights.sum()


def asks_for(loss: Loss, name: str) -> bool:
    """Whether a loss, or what it reports, has a parameter of this name."""
    return any(name in _parameters(part) for part in (loss, getattr(loss, "metrics", None)) if part is not None)


def call_by_name(loss: Callable[..., Any], named: Named) -> Any:
    """Give `loss` the tensors its parameters name; a required one that is missing is an error that names it."""
    wanted = {}
    for name, parameter in _parameters(loss).items():
        if named.get(name) is not None:
            wanted[name] = named[name]
        elif parameter.default is not inspect.Parameter.empty:
            continue
        elif name == "ref_logprobs" and not getattr(loss, "beta", 0) and "behaviour_logprobs" in named:
            # Without a KL term the reference of a loss is the policy that sampled.
            wanted[name] = named["behaviour_logprobs"]
        else:
            there = ", ".join(sorted(key for key, tensor in named.items() if tensor is not None))
            raise ValueError(f"{getattr(loss, '__name__', type(loss).__name__)} needs {name!r}; this batch has {there}")
    return loss(**wanted)


def _parameters(loss: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(getattr(loss, "forward", loss)).parameters
    return {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
