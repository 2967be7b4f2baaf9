"""One optimiser over one model, on any number of ranks: packed batches in, updated weights out.

Knows nothing of processes or messages; every rank of a group makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..data.packing import split
from ..names import adapters, apply_folded
from ..types import Batch
from .diagnostics import Tally, of_policy, reported
from .distributed import Ranks
from .heads import Head, Scalar, TokenValues, load
from .lora import LoraSettings, add_adapters, trained
from .mini_batches import mini_batches
from .named import Loss, asks_for, named_tensors, weighted
from .optimizer import OptimizerSettings, build_optimizer
from .policy import Policy, TokenScores, autocast, resolve_dtype, shard
from .scoring import score


class PolicyTrainer:
    """Trains a Hugging Face causal language model, or a critic or reward model made of one, under FSDP2 (one rank:
    unsharded).

    Args:
        model: folder or hub id.
        ranks: from `distributed.join`.
        optimizer: AdamW settings.
        head: "policy" gives tokens log-probabilities; "value" (a critic) gives each trained token one number, read
            before the token; "reward" one that is read at the token itself. See `forge.training.heads`.
        seq_len: most tokens of a micro-batch, and so of a sequence.
        accumulation_steps: least number of micro-batches an update is made of on each rank.
        mini_batches: parts that a batch is cut into, of whole units, each with an update of its own.
        epochs: how often a step goes through its batch.
        lora: train low-rank adapters alone: fields of `forge.training.lora.LoraSettings` (rank, alpha, targets).
        dtype: "float32" or "bfloat16" for the forward and backward pass.
        temperature: that of the sampler whose tokens are trained on.

    Raises:
        ValueError: a setting that means nothing, or a model that does not suit the head.
    """

    def __init__(
        self,
        model: str | Path,
        ranks: Ranks,
        optimizer: OptimizerSettings,
        *,
        head: Head = "policy",
        seq_len: int = 4096,
        accumulation_steps: int = 1,
        mini_batches: int = 1,
        epochs: int = 1,
        lora: dict[str, Any] | None = None,
        dtype: str = "float32",
        gradient_checkpointing: bool = False,
        temperature: float = 1.0,
    ) -> None:
        if mini_batches < 1 or epochs < 1:
            raise ValueError(f"mini_batches and epochs must be at least 1, got {mini_batches} and {epochs}")
        self.ranks = ranks
        self.settings = optimizer
        self.seq_len, self.accumulation_steps, self.temperature = seq_len, accumulation_steps, temperature
        self.mini_batches, self.epochs = mini_batches, epochs
        self.dtype = resolve_dtype(dtype, ranks.device)
        self.policy: Policy | Scalar = load(model, head, gradient_checkpointing=gradient_checkpointing)
        self.lora = None if lora is None else LoraSettings(**lora)
        if self.lora is not None:
            add_adapters(self.policy, self.lora)
        self.policy.to(ranks.device).train()
        if ranks.mesh is not None:
            shard(self.policy, ranks.mesh, self.dtype)
        self.optimizer = build_optimizer(self.policy, optimizer)
        self.step = 0  # steps, not updates: it is the version of the weights

    def train_step(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """`mini_batches * epochs` updates on a batch that every rank was given whole.

        With more than one, the policy that the step starts from is scored first, if the loss asks for it: it stays the
        `proximal_logprobs` of all updates, and the behaviour policy of tokens that do not know theirs. The learning
        rate is that of the step.

        Returns:
            metrics, equal on every rank: loss and grad_norm (means over updates), learning_rate, tokens, micro_batches,
            updates, and what `loss.metrics` reports, each name's mean over all that was returned under it. For a policy
            also means over trained tokens: of all updates entropy and kl (of the policy to the reference, k3), of the
            first epoch ratio and ratio_deviation (mean |ratio - 1|); ratio_max_deviation is a maximum. on_policy is the
            share of tokens that this very version sampled (its number is the step's), and engine_difference the mean
            |log ratio| of those, under the policy that the step starts from, if there are any: how far the engine that
            sampled and this trainer are apart under equal weights.

        Raises:
            FloatingPointError: the loss or the gradient of an update is not finite: the weights are left as they were
                before that update. Those before it in this step, if any, have been applied.
            ValueError: the loss asks for what is not there, or all weights of the batch are 0.
        """
        if self._start_matters(batch, loss):
            batch = replace(batch, proximal_logprobs=self.logprobs(batch))
        tally, updates = Tally(), list[dict[str, float]]()
        for epoch in range(self.epochs):
            for part in mini_batches(batch, self.mini_batches, (self.step, epoch)):
                updates.append(self._update(part, loss, tally, epoch == 0, first=not updates))
        self.step += 1
        return {
            **tally.reduce(self.ranks),
            "loss": sum(update["loss"] for update in updates) / len(updates),
            "grad_norm": sum(update["grad_norm"] for update in updates) / len(updates),
            "learning_rate": self._rate(self.step - 1),
            "tokens": float(len(batch.tokens)),
            "micro_batches": sum(update["micro_batches"] for update in updates),
            "updates": float(len(updates)),
        }

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Log-probabilities under the current weights, [tokens], 0 where not trained. Every rank must call it.

        ValueError: the model is no policy.
        """
        return self._score(batch, TokenScores)

    def predict(self, batch: Batch) -> np.ndarray:
        """What a value or reward head says of trained tokens, [tokens], 0 elsewhere. Every rank must call it.

        ValueError: the model is a policy.
        """
        return self._score(batch, TokenValues)

    def weights(self) -> dict[str, Tensor]:
        """What this rank holds of every parameter that trains, under its Hugging Face name: DTensors where they are
        sharded. With `lora` those are the factors, with alpha / rank in B: W + B A is the layer."""
        self._reshard()
        named = self.policy.model.named_parameters()
        if self.lora is not None:
            return trained(named, self.lora)
        return {name: parameter.detach() for name, parameter in named}

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, adapters merged. Every rank must iterate; all get the same."""
        factors = {name: _full(tensor) for name, tensor in adapters(self.weights().items()).items()}
        named = self.policy.model.named_parameters()
        base = ((name, _full(parameter.detach())) for name, parameter in named if name not in factors)
        return apply_folded(base, factors)

    def _update(self, part: Batch, loss: Loss, tally: Tally, first_epoch: bool, first: bool) -> dict[str, float]:
        """One update; `first` is that of a step."""
        micro_batches = split(
            part, ranks=self.ranks.world_size, max_tokens=self.seq_len, at_least=self.accumulation_steps
        )[self.ranks.rank]
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        self.optimizer.zero_grad(set_to_none=True)
        for micro in micro_batches:
            output = self._forward(micro)
            named = named_tensors(micro, output)
            value = weighted(loss, micro, named, output)
            value.backward()
            total += value.detach()
            reported(tally, loss, named)
            if isinstance(output, TokenScores):
                current = torch.from_numpy(micro.versions[micro.mask] == self.step).to(self.ranks.device)
                known = first or micro.proximal_logprobs is not None
                of_policy(tally, named, current, first_epoch=first_epoch, scored_at_start=known)
        found = float(self.ranks.sum(total))
        return {"loss": found, "grad_norm": self._apply(found), "micro_batches": float(len(micro_batches))}

    def _apply(self, loss: float) -> float:
        """Clip, check and apply the accumulated gradient; its norm."""
        bound = self.settings.max_grad_norm or float("inf")
        total = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), bound)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not torch.tensor([loss, norm]).isfinite().all():
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"step {self.step}: loss {loss}, gradient norm {norm}; the update was not applied")
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _rate(self, step: int) -> float:
        return self.settings.learning_rate * self.settings.scale(step)

    def _forward(self, batch: Batch) -> TokenScores | TokenValues:
        with autocast(self.ranks.device, self.dtype, self.ranks.mesh is not None):
            return self.policy(batch, self.temperature) if isinstance(self.policy, Policy) else self.policy(batch)

    def _score(self, batch: Batch, kind: type[TokenScores] | type[TokenValues]) -> np.ndarray:
        if isinstance(self.policy, Policy) != (kind is TokenScores):
            has, gives = ("policy", "logprobs") if isinstance(self.policy, Policy) else ("value or reward", "predict")
            raise ValueError(f"this trainer has a {has} head, which answers {gives} alone")
        numbers = score(lambda part: self._forward(part)[0], batch, max_tokens=self.seq_len, ranks=self.ranks)
        self._reshard()
        return numbers

    def _start_matters(self, batch: Batch, loss: Loss) -> bool:
        """Whether the policy that the step starts from has to be scored: the first of several updates moves it."""
        if self.mini_batches * self.epochs == 1 or not isinstance(self.policy, Policy):
            return False
        if np.isnan(batch.logprobs[batch.mask]).any() and asks_for(loss, "behaviour_logprobs"):
            return True
        # The losses of this library read it for their correction, where they have one.
        return asks_for(loss, "proximal_logprobs") and getattr(loss, "correction", loss) is not None

    def _reshard(self) -> None:
        """A forward pass without a backward one leaves copies, in its own dtype, in place of the parameters."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
