"""The trainer: packed batches in, updated weights out, on any number of ranks.

Every rank makes the same calls in the same order.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..config.plugin import resolve
from ..data.packing import split_batch
from ..models.tokenizer import model_config
from ..models.weight_layouts import merge_adapters, read_adapters
from ..system.devices import repeat_bits
from ..types import Batch
from .build import build_policy, precision_context, resolve_dtype
from .distributed import Ranks, move_state, reduce_over_copies, reshard_model, to_device
from .experts import balance_loss, load_metrics
from .optimizers import build_optimizer, clip_gradients
from .policy import TokenScores, TokenValues
from .settings import Backend, Head, LoraSettings, OptimizerSettings, PassSettings
from .step import Loss, Metrics, TokenRecord, loss_inputs, micro_batch_loss, mini_batches, parameters_of, score_tokens


class PolicyTrainer:
    """Trainer of a Hugging Face causal language model, critic or reward model, sharded over its ranks.

    Args:
        model: folder or hub id.
        ranks: from `distributed.join`.
        optimizer: settings of the optimiser and its schedule.
        backend: "fsdp": transformers' model, sharded by this library; "titan": TorchTitan's.
        head: "policy": log-probabilities of tokens; "value" (a critic): a scalar for each trained token, read at the
            token before it; "reward": a scalar read at the token itself.
        lora: train low-rank adapters only: `LoraSettings`, or its fields.
        temperature: of the sampler.
        **settings: fields of `forge.training.settings.PassSettings`, such as seq_len, dtype and mini_batches. With
            cpu_offload the ranks must have been joined with it.

    Raises:
        ValueError: an invalid setting, or an unsuitable model.
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
        self._model = model
        self._tokenizer: Any = None
        self.ranks = ranks
        self.settings = optimizer
        self.temperature = temperature
        self.passes = passes = PassSettings(**settings)

        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be finite and above 0, got {temperature}")

        if passes.deterministic:
            repeat_bits()

        # The device decides about the dtype, the head about the settings that apply.
        self.dtype = resolve_dtype(passes.dtype, ranks.device)
        self.head = head
        self.offloaded = False
        self.lora = None if lora is None else LoraSettings(**lora)
        if head == "policy":
            if backend == "fsdp" and ranks.experts > 1:
                raise ValueError("parallelism.expert_parallel_degree needs trainer.backend titan, got fsdp")
            passes.check(model_config(model))
        elif head == "reward" and passes.router_aux_loss:
            raise ValueError("training.router_aux_loss is not supported for reward models: omit it")

        # The optimiser comes last: its state has the layout of the sharded parameters.
        self.policy = build_policy(
            model,
            head,
            ranks,
            backend=backend,
            seq_len=passes.seq_len,
            lora=self.lora,
            dtype=self.dtype,
            weights_dtype=getattr(torch, passes.weights_dtype),
            gradient_checkpointing=passes.gradient_checkpointing,
            cpu_offload=passes.cpu_offload,
            compile=passes.compile,
            exact=passes.exact,
        )
        self.optimizer = build_optimizer(self.policy, optimizer)
        self.step = 0  # complete steps, not updates: it is the version of the weights
        self.recorded: dict[str, np.ndarray] | None = None  # of the last step, see `TokenRecord`
        is_checked = passes.exact and head == "policy"
        make_check = resolve("forge_families.exact:EngineCheck", "training.exact") if is_checked else None
        self.engine_check = make_check and make_check(self.policy, self.logprobs)

    def train_step(self, batch: Batch, loss: Loss, *, same_step: bool = False) -> dict[str, float]:
        """Train on a batch, which every rank gets in full, by `mini_batches * epochs` updates; return metrics.

        With several updates, the policy at the start of the step scores the batch first if the loss uses that: these
        are the `proximal_logprobs` of all updates, and the log-probabilities of the behaviour policy for tokens whose
        sampler is unknown. All updates have the step's learning rate.

        Args:
            same_step: the updates belong to the last step, so that `step` is not counted up.

        Returns:
            metrics, equal on every rank: loss and grad_norm (means over updates), learning_rate, tokens, micro_batches,
            updates, and the means of `loss.metrics`. For a policy also means over trained tokens: entropy and kl (to
            the reference, k3) of all updates; ratio and ratio_deviation (|ratio - 1|, its maximum is
            ratio_max_deviation) of the first epoch; on_policy, the share of tokens sampled by the version in training;
            and engine_difference, the mean |log ratio| between engine and trainer on those, under equal weights, in
            sequences that this version sampled whole (engine_difference_across_updates: in the others). For a mixture
            of experts also the metrics of `experts.load_metrics`; its `router_aux_loss` is not a part of the loss.

        Raises:
            FloatingPointError: the loss or gradient of an update is not finite. That update is not applied; earlier
                ones of this step are.
            ValueError: the loss needs a missing tensor, or all weights of the batch are 0.
        """
        if same_step and not self.step:
            raise ValueError("same_step needs an earlier training step: call train_step without it first")

        # Schedule, mini-batches and the share of tokens on policy belong to its step.
        step = self.step
        self.step -= same_step
        try:
            return self._run_step(batch, loss)
        finally:
            if same_step:
                self.step = step

    def _run_step(self, batch: Batch, loss: Loss) -> dict[str, float]:
        # With a single update the current policy is the proximal one.
        has_several_updates = self.passes.mini_batches * self.passes.epochs > 1
        if has_several_updates and self.head == "policy" and self._uses_proximal(batch, loss):
            batch = replace(batch, proximal_logprobs=self.logprobs(batch))

        self.onload()
        metrics = Metrics()
        if self.engine_check is not None:
            metrics.add("engine_difference", self.engine_check.check_earlier(batch, self.step).to(self.ranks.device))
        is_recorded = batch.recorded is not None and self.head == "policy"
        record = TokenRecord(batch, self.ranks.device) if is_recorded else None

        rate = self.settings.learning_rate * self.settings.scale(self.step)
        updates = list[dict[str, float]]()
        for epoch in range(self.passes.epochs):
            for mini in mini_batches(batch, self.passes.mini_batches, (self.step, epoch)):
                updates.append(self._update_weights(mini, loss, rate, metrics, epoch == 0, record, first=not updates))

        self.step += 1
        self.recorded = None if record is None else record.reduce(self.ranks, len(updates))
        routers = self.policy.routers
        return {
            **metrics.reduce(self.ranks),
            **(load_metrics(metrics.load, routers.layers, routers.k) if routers else {}),
            "loss": sum(update["loss"] for update in updates) / len(updates),
            "grad_norm": sum(update["grad_norm"] for update in updates) / len(updates),
            "learning_rate": rate,
            "tokens": float(len(batch.tokens)),
            "micro_batches": sum(update["micro_batches"] for update in updates),
            "updates": float(len(updates)),
        }

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Return tokens' log-probabilities under the current weights, [tokens], 0 where not trained. Every rank must
        call this. Raises a ValueError if the head is not "policy"."""
        return self._score_batch(batch, TokenScores)

    def predict(self, batch: Batch) -> np.ndarray:
        """Return a critic's or reward model's values, [tokens], 0 where not trained. Every rank must call this. Raises
        a ValueError if the head is "policy"."""
        return self._score_batch(batch, TokenValues)

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of every trained parameter by Hugging Face name, DTensors if sharded. With `lora`
        these are the factors A and B, B scaled by alpha / rank: the layer's weight is then W + B A."""
        reshard_model(self.policy)
        if self.lora is None:
            return {name: parameter.detach() for name, parameter in self.policy.named_weights()}

        scaling = self.lora.alpha / self.lora.rank
        return {
            name: parameter.detach() * scaling if name.endswith(".lora_B.weight") else parameter.detach()
            for name, parameter in self.policy.model.named_parameters()
            if parameter.requires_grad
        }

    def export_weights(self, *, meta: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator of (Hugging Face name, full tensor), adapters merged; it gathers one after another. Every
        rank must iterate; all get the same. With `meta` tensors have no values, and a single rank may iterate."""

        def gather_full(tensor: Tensor) -> Tensor:
            if meta:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if not isinstance(tensor, DTensor):
                return tensor
            on_device: Any = tensor.to(self.ranks.device)  # gathered there even if offloaded
            return on_device.full_tensor()

        factors = {name: gather_full(tensor) for name, tensor in read_adapters(self.weights().items()).items()}
        parameters = self.policy.named_weights()
        base = ((name, gather_full(parameter.detach())) for name, parameter in parameters if name not in factors)

        weights = merge_adapters(base, factors)
        return self.policy.join_stages(weights, meta) if self.ranks.stages > 1 else weights

    def offload(self) -> None:
        """Move parameters, gradients and optimiser state to host memory, until `onload` or the next call that needs
        them. Every rank must call this."""
        if not self.offloaded:
            self._move_model(torch.device("cpu"))
            self.offloaded = True
            if self.ranks.device.type != "cpu":
                # The copies are complete, and the device's memory is free, only after this.
                torch.get_device_module(self.ranks.device).synchronize()
                torch.accelerator.empty_cache()

    def onload(self) -> None:
        """Move parameters, gradients and optimiser state back to the device after `offload`. Every rank must call
        this."""
        if self.offloaded:
            # With cpu_offload parameters stay in host memory: FSDP2 copies them to the device itself.
            self._move_model(torch.device("cpu") if self.passes.cpu_offload else self.ranks.device)
            self.offloaded = False

    def _update_weights(
        self,
        part: Batch,
        loss: Loss,
        rate: float,
        metrics: Metrics,
        first_epoch: bool,
        record: TokenRecord | None,
        *,
        first: bool,
    ) -> dict[str, float]:
        """Update the weights by a mini-batch, the `first` of its step or a later one; return the update's metrics."""
        passes = self.passes
        batches_by_rank = split_batch(
            part,
            ranks=self.ranks.data.size,
            max_tokens=passes.seq_len,
            at_least=max(passes.gradient_accumulation_steps, self.ranks.pipeline.size),
        )
        micro_batches = batches_by_rank[self.ranks.data.rank]
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        self.optimizer.zero_grad(set_to_none=True)

        def compute_loss(turn: int, output: TokenScores | TokenValues) -> Tensor:
            # The loss of a micro-batch; it counts in the metrics.
            micro = micro_batches[turn]
            inputs = loss_inputs(micro, output)
            value = micro_batch_loss(loss, micro, inputs, output)
            total.add_(value.detach())

            if self.policy.routers is not None:
                # The routers' loss is over the micro-batches of this turn on all ranks, weighted by their tokens.
                turn_batches = [batches[turn] for batches in batches_by_rank]
                tokens = sum(len(batch.tokens) for batch in turn_batches if batch.mask.any())
                factor = passes.router_aux_loss * tokens / len(part.tokens)
                value = value + factor * self._balance_experts(micro, metrics)

            current = current_sequences = None
            if isinstance(output, TokenScores):
                masks = sampled_by(self.step, micro)
                columns = {name: torch.from_numpy(tokens[micro.mask]) for name, tokens in masks.items()}
                current, current_sequences = to_device(columns, self.ranks.device).values()

            # In the first update the current policy is the one at the start, scored or not.
            scored_at_start = first or micro.proximal_logprobs is not None
            if self.engine_check is not None and first_epoch and scored_at_start:
                self.engine_check.check_current(inputs, current, current_sequences)
            metrics.add_micro_batch(
                loss, inputs, current, current_sequences, first_epoch=first_epoch, scored_at_start=scored_at_start
            )
            if record is not None:
                record.add(micro, loss, inputs, first_epoch=first_epoch)
            return value

        if self.ranks.stages > 1:
            self.policy.run_stages(micro_batches, self.temperature, compute_loss)
        else:
            for turn, micro in enumerate(micro_batches):
                reduce_over_copies(self.policy, self.ranks, now=turn == len(micro_batches) - 1)
                # No name keeps its memory in use until the next micro-batch's forward pass is complete.
                compute_loss(turn, self._forward_batch(micro)).backward()

        return self._apply_update(total, rate) | {"micro_batches": float(len(micro_batches))}

    def _apply_update(self, total: Tensor, rate: float) -> dict[str, float]:
        """Update the weights by the gradients of a mini-batch whose loss is `total`; return the update's metrics."""
        self.ranks.sum(total)
        total_norm = clip_gradients(
            list(self.policy.parameters()), self.settings.max_grad_norm or float("inf"), self.ranks.pipeline.size
        )

        # Both in one copy, for which the host waits for the device.
        loss_value, norm = torch.stack([total, total_norm.to(total)]).tolist()
        if not (math.isfinite(loss_value) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"step {self.step}: loss {loss_value}, gradient norm {norm}; the update was not applied"
            )

        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # in torchao's optimisers
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss_value, "grad_norm": norm}

    def _forward_batch(self, batch: Batch) -> TokenScores | TokenValues:
        with precision_context(self.ranks, self.dtype):
            return self.policy(batch, self.temperature)

    def _balance_experts(self, micro: Batch, metrics: Metrics) -> Tensor:
        """Return this rank's share of the router loss over all ranks' micro-batches; record the load of the experts."""
        routers = self.policy.routers

        # A micro-batch without trained tokens only pads the number of a rank's micro-batches: its load is 0.
        load = routers.take() * bool(micro.mask.any())
        total_load = load.detach().double()
        if self.ranks.sequence.group is not None:
            dist.all_reduce(total_load, group=self.ranks.sequence.group)
        metrics.load = metrics.load + self.ranks.sum(total_load)  # its first value is a scalar 0
        return balance_loss(load, total_load, routers.k)

    def _score_batch(self, batch: Batch, kind: type[TokenScores] | type[TokenValues]) -> np.ndarray:
        if (self.head == "policy") != (kind is TokenScores):
            head, method = ("policy", "logprobs") if self.head == "policy" else ("value or reward", "predict")
            raise ValueError(f"this trainer has a {head} head, which supports only {method}")

        self.onload()
        scores = score_tokens(
            partial(self.policy.run_stages, temperature=self.temperature)
            if self.ranks.stages > 1
            else lambda micro_batches: (self._forward_batch(micro)[0] for micro in micro_batches),
            batch,
            max_tokens=self.passes.seq_len,
            ranks=self.ranks,
        )
        reshard_model(self.policy)
        return scores

    def _uses_proximal(self, batch: Batch, loss: Loss) -> bool:
        functions = [function for function in (loss, getattr(loss, "metrics", None)) if function is not None]
        names = {name for function in functions for name in parameters_of(function)}
        if "behaviour_logprobs" in names and np.isnan(batch.logprobs[batch.mask]).any():
            return True  # it stands in for the unknown sampler of a token
        # This library's losses use it for their off-policy correction, if they have one.
        return "proximal_logprobs" in names and getattr(loss, "correction", loss) is not None

    def _move_model(self, device: torch.device) -> None:
        reshard_model(self.policy)
        move_state(
            self.policy, self.optimizer, device, buffers=self.ranks.device if self.passes.cpu_offload else device
        )


def sampled_by(version: int, batch: Batch) -> dict[str, np.ndarray]:
    """Return two masks [tokens], bool: "current", the tokens that this version of the policy sampled, and
    "current_sequences", the tokens of sequences that it sampled from beginning to end."""
    current = batch.versions == version
    sampled_earlier = batch.mask & ~current
    began_earlier = np.add.reduceat(sampled_earlier, np.cumsum(batch.lengths) - batch.lengths) > 0
    return {"current": current, "current_sequences": ~np.repeat(began_earlier, batch.lengths)}
