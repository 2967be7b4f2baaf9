"""A Hugging Face causal language model as a policy: packed batch in, log-probabilities of its trained tokens out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..types import Batch
from .cpu_linear import ROWS, speed_up
from .packed_attention import NAME, PackedLayout
from .token_logprobs import token_logprobs


class TokenScores(NamedTuple):
    """What a policy says of the tokens with mask True: each [trained], float32, in nats."""

    logprobs: Tensor
    entropy: Tensor


class Packed(nn.Module):
    """Wraps a transformers model; the wrapped model keeps its parameter names and its own saving and loading."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        model.config._attn_implementation = NAME
        speed_up(model)
        self.model = model

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The backbone's last states [tokens, dim], the token ids [tokens], both padded, and where the tokens with mask
        True are among them [trained]."""
        device = next(self.model.parameters()).device
        lengths = batch.lengths.tolist()
        tokens = torch.from_numpy(batch.tokens).to(device)
        surplus = -len(tokens) % ROWS
        lengths += [1] * surplus  # sequences of one token, of which nothing is trained
        tokens = F.pad(tokens, (0, surplus))
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        hidden = self.model.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            layout=PackedLayout.of(lengths, device),
        ).last_hidden_state[0]
        return hidden, tokens, torch.from_numpy(batch.mask).to(device).nonzero()[:, 0]


class Policy(Packed):
    """A causal language model."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *, gradient_checkpointing: bool = False) -> Policy:
        """Load float32 weights from a folder or a hub id (see `forge.models.resolve_model`)."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return cls(model)

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Log-probability and entropy of each token with mask True."""
        hidden, tokens, trained = self.hidden(batch)
        # The state at t - 1 predicts token t.
        before, head = hidden[trained - 1], self.model.lm_head.weight
        return TokenScores(*token_logprobs(before, head, tokens[trained], temperature=temperature))


def shard(policy: Packed, mesh: DeviceMesh, dtype: torch.dtype) -> Packed:
    """Apply FSDP2 in place: one group a decoder layer, one for embedding, final norm and head (which may be tied).

    Args:
        mesh: one dimension shards; two dimensions (replicate, shard) give HSDP.
        dtype: of the forward and backward pass; parameters and reductions stay float32.
    """
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for layer in policy.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Weights of the loss are already shares of the whole batch: gradients add up, and gloo can only add.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return policy


def autocast(device: torch.device, dtype: torch.dtype, sharded: bool):
    """bf16 where FSDP's own mixed precision does not already see to it."""
    if sharded or dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass: bfloat16 only where the device computes in it.

    Raises:
        ValueError: neither float32 nor bfloat16.
    """
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"training.dtype must be float32 or bfloat16, got {name!r}")
    if name == "bfloat16" and device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        print("training.dtype: this CPU has no bfloat16 arithmetic; computing in float32")
        return torch.float32
    return getattr(torch, name)
