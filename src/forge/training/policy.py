"""A Hugging Face causal language model as a policy: packed batch in, log-probabilities of its trained tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from math import lcm
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..types import Batch
from .cpu_linear import ROWS, speed_up
from .distributed import Group, Ranks
from .packed_attention import NAME, PackedLayout
from .sequence import whole
from .token_logprobs import token_logprobs


class TokenScores(NamedTuple):
    """What a policy says of the tokens with mask True: each [trained], float32, in nats."""

    logprobs: Tensor
    entropy: Tensor


class Own(NamedTuple):
    """A rank's share of a pack whose tokens several ranks have, and what it reads there.

    tokens: [own] ids.
    gathered, positions: [own * ranks of tensor parallelism], the tokens of all of those and where they stand.
    layout: of the whole pack.
    at: [read], the places of its tokens whose states are read.
    labels: [read] ids of the tokens that they are read for.
    counts: how many each rank reads, in order.
    """

    tokens: Tensor
    gathered: Tensor
    positions: Tensor
    layout: PackedLayout
    at: Tensor
    labels: Tensor
    counts: list[int]


def own_tokens(batch: Batch, lag: int, ranks: Ranks) -> Own:
    """This rank's share of a batch, of which states are read `lag` tokens before those with mask True."""
    context, sequence, device = ranks.context, ranks.sequence, ranks.device
    lengths = batch.lengths.tolist()
    surplus = -len(batch.tokens) % lcm(ROWS, sequence.size)
    lengths += [1] * surplus  # sequences of one token, of which nothing is trained
    tokens = F.pad(torch.from_numpy(batch.tokens), (0, surplus))
    positions = torch.cat([torch.arange(n) for n in lengths])
    own = tokens.chunk(sequence.size)[sequence.rank]
    first = sequence.rank * len(own)
    read = torch.from_numpy(np.flatnonzero(batch.mask) - lag)
    mine = read[(read >= first) & (read < first + len(own))]
    return Own(
        own.to(device),
        tokens.chunk(context.size)[context.rank].to(device),
        positions.chunk(context.size)[context.rank].to(device),
        PackedLayout.of(lengths, device),
        (mine - first).to(device),
        tokens[mine + lag].to(device),
        torch.bincount(read // len(own), minlength=sequence.size).tolist(),
    )


class Packed(nn.Module):
    """Wraps a transformers model; the wrapped model keeps its parameter names and its own saving and loading.

    All that a trainer knows of a model is `forward`, `named_weights`, `save` and the parameters.
    """

    model: PreTrainedModel
    ranks: Ranks | None = None  # None: one process, wherever the model is

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        model.config._attn_implementation = NAME
        speed_up(model)
        self.model = model

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, what this rank holds of it), a DTensor where it is divided; of tied ones the first."""
        yield from self.model.named_parameters()

    def save(self, folder: Path, weights: dict[str, Tensor], words: PreTrainedTokenizerBase) -> None:
        """Write whole weights, under the names of `named_weights`, and the configuration."""
        self.model.save_pretrained(folder, state_dict=weights)

    def states(self, batch: Batch, lag: int) -> tuple[Tensor, Own, Group]:
        """The backbone's states [read, dim] `lag` tokens before those with mask True, as far as this rank has them;
        what they are; and the ranks that have the others."""
        ranks = self.ranks or Ranks(0, 1, next(self.model.parameters()).device, None)
        own = own_tokens(batch, lag, ranks)
        hidden = self.model.model(
            input_ids=own.tokens[None],
            position_ids=own.positions[None],
            use_cache=False,
            layout=own.layout,
            context=ranks.context,
        ).last_hidden_state[0]
        return hidden[own.at], own, ranks.sequence


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
        # The state at t - 1 predicts token t.
        states, own, group = self.states(batch, lag=1)
        scores = token_logprobs(states, self.model.lm_head.weight, own.labels, temperature=temperature)
        return TokenScores(*whole(scores, own.counts, group))


def autocast(device: torch.device, dtype: torch.dtype, sharded: bool):
    """bf16 where FSDP's own mixed precision does not already see to it."""
    if sharded or dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass: bfloat16 only where the device computes in it."""
    if name == "bfloat16" and device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        print("training.dtype: this CPU has no bfloat16 arithmetic; computing in float32")
        return torch.float32
    return getattr(torch, name)
