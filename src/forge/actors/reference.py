"""The frozen reference model that the policy is kept close to."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from ..models.hub import check_model_name
from ..observability import phase
from ..runtime.controller import ForgeActor, Options, endpoint
from ..training.settings import Parallelism, PassSettings
from ..types import Batch


class ReferenceModel(ForgeActor):
    """Frozen component that computes log-probabilities of batches under the initial weights of the training.

    Args:
        model: Hugging Face folder or hub id of these weights.
        temperature: of the sampler, as in the trainer.
        parallelism: how several `procs` share the model, fields of `forge.training.settings.Parallelism`.
        sharded: whether the policy that it is compared with is sharded. In bfloat16 that decides what is rounded: FSDP2
            rounds all weights, autocast in one process only the inputs of products.
        settings: `seq_len`, `dtype` and `weights_dtype` of `forge.training.settings.PassSettings`, as in the trainer.
    """

    constructor_checks = True

    def __init__(
        self,
        model: str,
        *,
        temperature: float = 1.0,
        parallelism: Mapping[str, Any] | None = None,
        sharded: bool = False,
        **settings: Any,
    ) -> None:
        check_model_name(model)
        self.model, self.temperature = model, temperature
        self.passes = PassSettings(**settings)
        self.sharded = sharded
        self.layout = Parallelism(**(parallelism or {}))

    @classmethod
    def place(cls, options: Options, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Check that the ranks of a replica can divide the model, and return options and arguments unchanged.

        Raises:
            ValueError: they cannot.
        """
        if options.procs != 1:
            Parallelism(**(kwargs.get("parallelism") or {})).over(options.procs, f"procs = {options.procs}")
        return options, kwargs

    def setup(self) -> None:
        """Load the frozen model; the ranks of a replica of several processes join a process group."""
        import torch

        from ..runtime.process_groups import process_store
        from ..training.build import build_policy, resolve_dtype, round_products
        from ..training.distributed import join_ranks

        context = self.context
        if context.world_size == 1:
            self.ranks = join_ranks(context.replica)  # each replica takes another one of the devices that all see
        else:
            store = process_store(context.rendezvous, context.world_size, context.rank)
            self.ranks = join_ranks(context.rank, context.world_size, store, self.layout)

        self.dtype = dtype = resolve_dtype(self.passes.dtype, self.ranks.device)
        self.rounded = self.sharded or self.ranks.mesh is not None
        weights_dtype = dtype if self.rounded else getattr(torch, self.passes.weights_dtype)
        loaded_policy = build_policy(
            self.model, "policy", self.ranks, seq_len=self.passes.seq_len, dtype=dtype, weights_dtype=weights_dtype
        )
        self.policy = loaded_policy.requires_grad_(False).eval()
        if dtype == torch.bfloat16 and not self.rounded:
            round_products(self.policy, dtype)

    def teardown(self) -> None:
        """Leave the process group."""
        from ..training.distributed import leave_ranks

        if self.context.world_size > 1:  # otherwise the group belongs to a trainer in the same process
            leave_ranks()

    @endpoint
    def logprobs(self, batch: Batch) -> np.ndarray:
        """Return the log-probabilities of the batch's trained tokens, [tokens]; 0 at all other tokens."""
        from ..training.build import precision_context
        from ..training.distributed import reshard_model
        from ..training.step import score_tokens

        with phase("reference") if self.context.rank == 0 else nullcontext():
            batch = replace(batch, experts=None)  # recorded routing of the policy, which is another model
            with nullcontext() if self.rounded else precision_context(self.ranks, self.dtype):
                logprobs = score_tokens(
                    lambda micro_batches: (self.policy(micro, self.temperature).logprobs for micro in micro_batches),
                    batch,
                    max_tokens=self.passes.seq_len,
                    ranks=self.ranks,
                )
            reshard_model(self.policy)
            return logprobs
