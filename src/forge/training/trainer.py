"""One optimiser over one model, on any number of ranks: packed batches in, updated weights out.

Knows nothing of processes or messages; every rank of a group makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from .build import Backend, build
from .diagnostics import Tally, of_policy, reported
from .distributed import Ranks
from .heads import Head, TokenValues
from .lora import trained
from .mini_batches import mini_batches
from .named import Loss, asks_for, named_tensors, weighted
from .optimizer import build_optimizer, clip_gradients
from .policy import TokenScores, autocast, resolve_dtype
from .residence import move
from .scoring import score
from .settings import LoraSettings, OptimizerSettings, PassSettings


class PolicyTrainer:
    """Trains a Hugging Face causal language model, or a critic or reward model made of one, divided as its ranks are
    (one rank: not at all).

    Args:
        model: folder or hub id.
        ranks: from `distributed.join`.
        optimizer: AdamW settings.
        backend: whose model it is: "fsdp" is transformers', divided by this library; "titan" is TorchTitan's.
        head: "policy" gives tokens log-probabilities; "value" (a critic) gives each trained token one number, read
            before the token; "reward" one that is read at the token itself. See `forge.training.heads`.
        lora: train low-rank adapters alone: `LoraSettings`, or its fields.
        temperature: that of the sampler whose tokens are trained on.
        **settings: fields of `forge.training.settings.PassSettings`, such as seq_len, dtype and mini_batches. With
            cpu_offload the ranks must have been joined with it.

    Raises:
        ValueError: an invalid setting, or a model that does not suit the head.
    """

    def __init__(
        self,
        model: str | Path,
        ranks: Ranks,
        optimizer: OptimizerSettings,
        *,
        backend: Backend = "fsdp",
        head: Head = "policy",
        lora: LoraSettings | Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        **settings: Any,
    ) -> None:
        self.ranks, self.settings, self.temperature = ranks, optimizer, temperature
        self.passes = passes = PassSettings(**settings)
        self.dtype = resolve_dtype(passes.dtype, ranks.device)
        self.head, self.offloaded = head, False
        self.lora = None if lora is None else LoraSettings(**lora)
        self.policy = build(
            model,
            head,
            ranks,
            backend=backend,
            seq_len=passes.seq_len,
            lora=self.lora,
            dtype=self.dtype,
            gradient_checkpointing=passes.gradient_checkpointing,
            cpu_offload=passes.cpu_offload,
            compile=passes.compile,
        )
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
        self.onload()
        tally, updates = Tally(), list[dict[str, float]]()
        for epoch in range(self.passes.epochs):
            for part in mini_batches(batch, self.passes.mini_batches, (self.step, epoch)):
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
        named = self.policy.named_weights()
        if self.lora is not None:
            return trained(named, self.lora)
        return {name: parameter.detach() for name, parameter in named}

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, adapters merged. Every rank must iterate; all get the same."""
        factors = {name: self._whole(tensor) for name, tensor in adapters(self.weights().items()).items()}
        named = self.policy.named_weights()
        base = ((name, self._whole(parameter.detach())) for name, parameter in named if name not in factors)
        return apply_folded(base, factors)

    def offload(self) -> None:
        """Move parameters, gradients and optimiser to host memory and leave the device's to others, until `onload` or
        whatever needs them next. Every rank must call it."""
        if not self.offloaded:
            self._move(torch.device("cpu"))
            self.offloaded = True
            if self.ranks.device.type != "cpu":
                torch.accelerator.empty_cache()

    def onload(self) -> None:
        """Bring back what `offload` moved, if it did."""
        if self.offloaded:
            # What lives in host memory anyway comes to the device by itself.
            self._move(torch.device("cpu") if self.passes.cpu_offload else self.ranks.device)
            self.offloaded = False

    def _update(self, part: Batch, loss: Loss, tally: Tally, first_epoch: bool, first: bool) -> dict[str, float]:
        """One update; `first` is that of a step."""
        data, how = self.ranks.data, self.passes
        parts = split(part, ranks=data.size, max_tokens=how.seq_len, at_least=how.gradient_accumulation_steps)
        micro_batches = parts[data.rank]
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
        norm = clip_gradients(list(self.policy.parameters()), self.settings.max_grad_norm or float("inf"))
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
            return self.policy(batch, self.temperature)

    def _score(self, batch: Batch, kind: type[TokenScores] | type[TokenValues]) -> np.ndarray:
        if (self.head == "policy") != (kind is TokenScores):
            has, gives = ("policy", "logprobs") if self.head == "policy" else ("value or reward", "predict")
            raise ValueError(f"this trainer has a {has} head, which answers {gives} alone")
        self.onload()
        numbers = score(lambda part: self._forward(part)[0], batch, max_tokens=self.passes.seq_len, ranks=self.ranks)
        self._reshard()
        return numbers

    def _start_matters(self, batch: Batch, loss: Loss) -> bool:
        """Whether the policy that the step starts from has to be scored: the first of several updates moves it."""
        if self.passes.mini_batches * self.passes.epochs == 1 or self.head != "policy":
            return False
        if np.isnan(batch.logprobs[batch.mask]).any() and asks_for(loss, "behaviour_logprobs"):
            return True
        # The losses of this library read it for their correction, where they have one.
        return asks_for(loss, "proximal_logprobs") and getattr(loss, "correction", loss) is not None

    def _whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor, which its ranks gather on their devices wherever it lives."""
        if not isinstance(tensor, DTensor):
            return tensor
        there: Any = tensor.to(self.ranks.device)
        return there.full_tensor()

    def _move(self, to: torch.device) -> None:
        self._reshard()
        move(self.policy, self.optimizer, to, buffers=self.ranks.device if self.passes.cpu_offload else to)

    def _reshard(self) -> None:
        """A forward pass without a backward one leaves copies, in its own dtype, in place of the parameters."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
