"""One optimiser over one policy, on any number of ranks: packed batches in, updated weights out.

Knows nothing of processes or messages; every rank of a group makes the same calls in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from ..data.packing import split
from ..losses.common import importance_ratio, kl_k3
from ..types import Batch
from .distributed import Ranks
from .optimizer import OptimizerSettings, build_optimizer
from .policy import Policy, autocast, resolve_dtype, shard
from .scoring import score

Loss = Callable[..., Tensor]


class PolicyTrainer:
    """Trains a Hugging Face causal language model under FSDP2 (one rank: unsharded).

    Args:
        model: folder or hub id.
        ranks: from `distributed.join`.
        optimizer: AdamW settings.
        seq_len: most tokens of a micro-batch, and so of a sequence.
        accumulation_steps: least number of micro-batches an optimiser step is made of on each rank.
        dtype: "float32" or "bfloat16" for the forward and backward pass.
        temperature: that of the sampler whose tokens are trained on.
    """

    def __init__(
        self,
        model: str | Path,
        ranks: Ranks,
        optimizer: OptimizerSettings,
        *,
        seq_len: int = 4096,
        accumulation_steps: int = 1,
        dtype: str = "float32",
        gradient_checkpointing: bool = False,
        temperature: float = 1.0,
    ) -> None:
        self.ranks = ranks
        self.settings = optimizer
        self.seq_len, self.accumulation_steps, self.temperature = seq_len, accumulation_steps, temperature
        self.dtype = resolve_dtype(dtype, ranks.device)
        self.policy = Policy.from_pretrained(model, gradient_checkpointing=gradient_checkpointing).to(ranks.device)
        self.policy.train()
        if ranks.mesh is not None:
            shard(self.policy, ranks.mesh, self.dtype)
        self.optimizer = build_optimizer(self.policy, optimizer)
        self.step = 0

    def train_step(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One optimiser step on a batch that every rank was given whole.

        Returns:
            metrics, equal on every rank: loss, grad_norm, learning_rate, tokens, micro_batches, and means over trained
            tokens of entropy, kl (of the policy to the reference, k3), ratio, ratio_deviation (mean |ratio - 1|) and
            whatever `loss.metrics` reports; ratio_max_deviation is a maximum. on_policy is the share of tokens that
            this very version sampled (its number is the step's), and engine_difference the mean |log ratio| of those,
            if there are any: how far the engine that sampled and this trainer are apart under equal weights.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; the weights are left as they were.
        """
        micro_batches = split(
            batch, ranks=self.ranks.world_size, max_tokens=self.seq_len, at_least=self.accumulation_steps
        )
        totals: dict[str, Tensor] = {}
        largest = torch.zeros((), device=self.ranks.device)
        self.optimizer.zero_grad(set_to_none=True)
        for micro in micro_batches[self.ranks.rank]:
            with autocast(self.ranks.device, self.dtype, self.ranks.mesh is not None):
                logprobs, entropy = self.policy(micro, self.temperature)
            tensors = self._named_tensors(micro, logprobs, entropy)
            value = _weighted(loss, micro, tensors)
            value.backward()
            current = torch.from_numpy(micro.versions[micro.mask] == self.step).to(logprobs.device)
            for name, amount in _token_sums(loss, tensors, current).items():
                totals[name] = totals.get(name, torch.zeros_like(amount)) + amount
            totals["loss"] = totals.get("loss", torch.zeros((), device=value.device)) + value.detach()
            behaviour = tensors["behaviour_logprobs"]
            if behaviour is not None and len(behaviour):
                ratio = importance_ratio(logprobs.detach(), behaviour)
                largest = torch.maximum(largest, (ratio - 1.0).abs().max())
        metrics = self._reduce(totals, int(batch.mask.sum()))
        metrics["ratio_max_deviation"] = self._max(largest)
        apart = metrics.pop("engine_difference")
        if metrics["on_policy"]:
            metrics["engine_difference"] = apart / metrics["on_policy"]
        metrics |= self.optimizer_step(metrics["loss"])
        return metrics | {"tokens": float(len(batch.tokens)), "micro_batches": float(len(micro_batches[0]))}

    def optimizer_step(self, loss: float) -> dict[str, float]:
        """Clip, check and apply the accumulated gradient."""
        bound = self.settings.max_grad_norm or float("inf")
        total = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), bound)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not torch.tensor([loss, norm]).isfinite().all():
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"step {self.step}: loss {loss}, gradient norm {norm}; the update was not applied")
        rate = self.settings.learning_rate * self.settings.scale(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"grad_norm": norm, "learning_rate": rate}

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Log-probabilities under the current weights, [tokens], 0 where not trained. Every rank must call it."""
        with autocast(self.ranks.device, self.dtype, self.ranks.mesh is not None):
            scores = score(self.policy, batch, max_tokens=self.seq_len, temperature=self.temperature)
        self._reshard()
        return scores

    def weights(self) -> dict[str, Tensor]:
        """What this rank holds of every parameter, under its Hugging Face name: DTensors where they are sharded."""
        self._reshard()
        return {name: parameter.detach() for name, parameter in self.policy.model.named_parameters()}

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names. Every rank must iterate; all get the same."""
        for name, tensor in self.weights().items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _reshard(self) -> None:
        """A forward pass without a backward one leaves copies, in its own dtype, in place of the parameters."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _named_tensors(self, micro: Batch, logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor | None]:
        """What a loss may ask for by name, each [trained tokens of the micro-batch]."""

        def trained(values) -> Tensor:
            return torch.from_numpy(values[micro.mask]).to(logprobs.device)

        behaviour = trained(micro.logprobs)
        return {
            "logprobs": logprobs,
            "behaviour_logprobs": torch.where(behaviour.isnan(), logprobs.detach(), behaviour),
            "ref_logprobs": None if micro.ref_logprobs is None else trained(micro.ref_logprobs),
            "advantages": trained(micro.advantages),
            "weights": trained(micro.weights),
            "padding_mask": torch.ones_like(logprobs),
            "entropy": entropy,
        }

    def _reduce(self, totals: dict[str, Tensor], tokens: int) -> dict[str, float]:
        names = sorted(totals)
        summed = self.ranks.sum(torch.stack([totals[name].double() for name in names])).tolist()
        return {name: value if name == "loss" else value / tokens for name, value in zip(names, summed, strict=True)}

    def _max(self, value: Tensor) -> float:
        if self.ranks.mesh is not None:
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
        return float(value)


def _weighted(loss: Loss, micro: Batch, tensors: dict[str, Tensor | None]) -> Tensor:
    """The micro-batch's part of the batch's loss.

    A loss that takes no `weights` has means of its own: it is given [sequences, width], padded on the right, and its
    value counts by the micro-batch's share of the batch. That is exact where its mean is the batch's aggregation.
    """
    if "weights" in _parameters(loss):
        return _call_by_name(loss, tensors)
    logprobs, weights = tensors["logprobs"], tensors["weights"]
    assert logprobs is not None and weights is not None
    if not len(logprobs):
        return logprobs.sum()
    counts = [int(own.sum()) for own in np.split(micro.mask, np.cumsum(micro.lengths)[:-1])]
    padded = {
        name: None if values is None else pad_sequence(values.split(counts), batch_first=True)
        for name, values in tensors.items()
    }
    return _call_by_name(loss, padded) * weights.sum()


def _parameters(loss: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(getattr(loss, "forward", loss)).parameters
    return {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _call_by_name(loss: Callable[..., Any], tensors: dict[str, Tensor | None]) -> Any:
    """Give `loss` the tensors its parameters name; a required one that is missing is an error that names it."""
    wanted = {}
    for name, parameter in _parameters(loss).items():
        if tensors.get(name) is not None:
            wanted[name] = tensors[name]
        elif parameter.default is not inspect.Parameter.empty:
            continue
        elif name == "ref_logprobs" and not getattr(loss, "beta", 0):
            # Without a KL term the reference of a loss is the policy that sampled.
            wanted[name] = tensors["behaviour_logprobs"]
        else:
            there = ", ".join(sorted(key for key, tensor in tensors.items() if tensor is not None))
            raise ValueError(f"{getattr(loss, '__name__', type(loss).__name__)} needs {name!r}; this batch has {there}")
    return loss(**wanted)


@torch.no_grad()
def _token_sums(loss: Loss, tensors: dict[str, Tensor | None], current: Tensor) -> dict[str, Tensor]:
    """Sums over trained tokens of the standard diagnostics and of the loss's own; `current` marks the tokens of the
    version that trains."""
    logprobs, behaviour, entropy, ref = (
        tensors[name] for name in ("logprobs", "behaviour_logprobs", "entropy", "ref_logprobs")
    )
    assert logprobs is not None and behaviour is not None and entropy is not None
    ratio = importance_ratio(logprobs, behaviour)
    sums = {"entropy": entropy.sum(), "ratio": ratio.sum(), "ratio_deviation": (ratio - 1.0).abs().sum()}
    sums["on_policy"] = current.sum()
    sums["engine_difference"] = (logprobs - behaviour)[current].abs().sum()
    if ref is not None:
        sums["kl"] = kl_k3(logprobs, ref).sum()
    if hasattr(loss, "metrics"):
        sums |= {name: values.sum() for name, values in _call_by_name(loss.metrics, tensors).items()}
    return sums
