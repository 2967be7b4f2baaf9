"""Transformers models to train: a policy, a critic or a reward model; packed batch in, scores of its tokens out.

RMSNorm is one kernel where a device has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..data.prefixes import find_prefixes, prefix_ids
from ..models.architecture import check_config, rotary_limit, sparse_layers
from ..models.find import check_classifier, quiet_loading
from ..system.devices import type_of
from ..types import UNKNOWN_EXPERT, Batch
from .attention import NAME, PackedLayout, gather_scores
from .distributed import Ranks, to_device
from .experts import Routers
from .flex import BLOCK, MIN_TOKENS, Runs, TreeMask
from .linear import ROWS, at_least_float32, speed_up, token_logprobs
from .loading import on_meta
from .lora import SCORE
from .settings import Head


class TokenScores(NamedTuple):
    """A policy's scores of the tokens with mask True: each [trained], float32, in nats."""

    logprobs: Tensor
    entropy: Tensor


class TokenValues(NamedTuple):
    """A scalar head's values of the tokens with mask True: [trained], float32."""

    values: Tensor


class RankTokens(NamedTuple):
    """A rank's share of a pack, and the positions whose states it reads. A prefix that sequences share is one run of
    the pack, computed once.

    tokens: [local] ids.
    gathered, positions: [local * tensor-parallel ranks], the tokens of all of those ranks and their positions.
    layout: of the whole pack.
    state_indices: [read], indices of this rank's tokens whose states are read.
    labels: [read], the token ids that they are read for.
    experts: [local, layers, k], those to replay, if any.
    real: number of local tokens that are not padding.
    counts: number of states that each rank reads.
    order: [read by all ranks], the index in the order of ranks of the state of each token with mask True.
    """

    tokens: Tensor
    gathered: Tensor
    positions: Tensor
    layout: PackedLayout
    state_indices: Tensor
    labels: Tensor
    experts: Tensor | None
    real: int
    counts: list[int]
    order: Tensor


def rank_tokens(batch: Batch, lag: int, ranks: Ranks) -> RankTokens:
    """This rank's share of a batch, whose states are read `lag` tokens before those with mask True."""
    context, sequence, device = ranks.context, ranks.sequence, ranks.device
    # The pack of all ranks: the batch with each shared prefix once, padded.
    tree = find_prefixes(prefix_ids(batch), batch.lengths)
    surplus = count_padding(len(tree.source), sequence.size, device)
    lengths = tree.lengths + [1] * surplus  # padding: untrained sequences of one token
    parents = tree.parents + [-1] * surplus
    tokens = F.pad(torch.from_numpy(batch.tokens[tree.source]), (0, surplus))
    positions = F.pad(torch.from_numpy(tree.positions), (0, surplus))

    local = tokens.chunk(sequence.size)[sequence.rank]
    first = sequence.rank * len(local)
    real = min(max(len(tree.source) - first, 0), len(local))

    # Which rank has the state that each trained token is read from.
    trained = np.flatnonzero(batch.mask)
    read = torch.from_numpy(tree.index[trained - lag])
    rank = read // len(local)
    by_rank = rank.argsort(stable=True)
    local_reads = (rank == sequence.rank).nonzero()[:, 0]
    columns = {
        "tokens": local,
        "gathered": tokens.chunk(context.size)[context.rank],
        "positions": positions.chunk(context.size)[context.rank],
        "state_indices": read[local_reads] - first,
        "labels": torch.from_numpy(batch.tokens[trained])[local_reads],
        "order": torch.empty_like(by_rank).scatter_(0, by_rank, torch.arange(len(by_rank))),
    }

    if batch.experts is not None:
        experts = torch.from_numpy(batch.experts[tree.source[first : first + real]]).long()
        columns["experts"] = F.pad(experts, (0, 0, 0, 0, 0, len(local) - real), value=UNKNOWN_EXPERT)

    # All tensors go to the device in one copy, including an accelerator's mask.
    runs = None if type_of(device) == "cpu" else Runs.from_lengths(lengths, parents)
    if runs is not None:
        columns |= runs.columns()
    on_device = to_device(columns, device)
    if runs is None:
        layout = PackedLayout.from_lengths(lengths, device, parents)
    else:
        layout = PackedLayout.masked(TreeMask(runs, *(on_device.pop(name) for name in ("first", "end", "position"))))

    counts = torch.bincount(rank, minlength=sequence.size).tolist()
    return RankTokens(layout=layout, experts=on_device.pop("experts", None), real=real, counts=counts, **on_device)


def count_padding(tokens: int, ranks: int, device: torch.device) -> int:
    """Return the number of tokens to add to a pack of `tokens`, which `ranks` share."""
    if type_of(device) == "cpu":
        return -tokens % lcm(ROWS, ranks)
    return max(tokens, MIN_TOKENS) + -max(tokens, MIN_TOKENS) % lcm(BLOCK, ranks) - tokens


class PackedModel(nn.Module):
    """A transformers model over packed batches. A trainer uses only `forward`, `named_weights`, `save_config` and the
    parameters."""

    model: PreTrainedModel
    ranks: Ranks | None = None  # None: one process, on the model's device
    routers: Routers | None = None  # of a policy that is a mixture of experts

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        check_config(model.config)
        model.config._attn_implementation = NAME
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                # Off in training as well: a ratio or a KL compares two scorings, which dropout would set apart.
                module.p = 0.0
        speed_up(model)
        fuse_norms(model)
        self.model = model

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, this rank's part), a DTensor if sharded; of tied parameters the first."""
        return self.model.named_parameters()

    def save_config(self, folder: Path, words: PreTrainedTokenizerBase) -> None:
        """Write all but weights and tokenizer in Hugging Face format."""
        self.model.save_pretrained(folder, state_dict={})

    def states(self, batch: Batch, lag: int) -> tuple[Tensor, RankTokens, Ranks]:
        """Return the backbone's states [read, dim], `lag` tokens before those with mask True, of this rank's tokens."""
        ranks = self.ranks or Ranks(0, 1, next(self.model.parameters()).device, None)
        local = rank_tokens(batch, lag, ranks)
        limit = rotary_limit(self.model.config)
        length = int(batch.lengths.max())
        if limit is not None and length > limit[0]:
            raise ValueError(
                f"a sequence of {length} tokens: beyond {limit[0]} this model's {limit[1]} is not supported"
            )

        if self.routers is not None:
            self.routers.begin(local.experts, local.real)
        hidden = self.model.model(
            input_ids=local.tokens[None],
            position_ids=local.positions[None],
            use_cache=False,
            layout=local.layout,
            context=ranks.context,
        ).last_hidden_state[0]

        return hidden[local.state_indices], local, ranks


class Policy(PackedModel):
    """A causal language model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config: Any = model.config
        if config.tie_word_embeddings and model.lm_head.weight is not model.model.embed_tokens.weight:
            raise ValueError("the head is not the embedding, though tie_word_embeddings is true: set it to false")
        if sparse := sparse_layers(config):
            gates: dict[int, Any] = {i: model.model.layers[i].mlp.gate for i in sparse}
            self.routers = Routers(gates, config.num_experts_per_tok, config.norm_topk_prob)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
        meta: bool = False,
    ) -> Policy:
        """Load weights in `dtype` from a folder or a hub id (see `forge.models.resolve_model`). With `meta` those that
        `loading.fill` can read stay on the meta device."""
        built = on_meta(AutoModelForCausalLM, path, dtype) if meta else None
        if built is not None:
            model = built[0]
        else:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
            )
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return cls(model)

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Return log-probability and entropy of each token with mask True."""
        states, local, ranks = self.states(batch, lag=1)  # the state at t - 1 predicts token t
        scores = token_logprobs(states, self.model.lm_head.weight, local.labels, temperature=temperature)
        return TokenScores(*gather_scores(scores, local.counts, ranks.sequence, local.order))


class ScalarModel(PackedModel):
    """A transformers sequence classifier of one class: a critic or a reward model.

    Args:
        lag: distance in tokens: 1 for a critic, whose value of a state must not depend on the action taken in it; 0 for
            a reward model, which transformers reads at a sequence's last token.
    """

    def __init__(self, model: PreTrainedModel, lag: int) -> None:
        super().__init__(model)
        self.lag = lag

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        head: Head,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
        meta: bool = False,
    ) -> ScalarModel:
        """Load weights in `dtype` of a sequence classifier, or of a causal language model's backbone; `meta` as in
        `Policy.from_pretrained`.

        A new head is 0 for a critic, and for a reward model has variance 1 / (dim + 1) (Stiennon et al. 2020), equal on
        every rank and in every run.

        Raises:
            ValueError: a classifier of several classes, or weights other than the head are missing.
        """
        classes = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_classifier(classes)
        if any("SequenceClassification" in name for name in classes.architectures or ()) and classes.num_labels != 1:
            raise ValueError(f"{path} has {classes.num_labels} classes: a {head} model has one scalar per token")
        kind = AutoModelForSequenceClassification
        built = on_meta(kind, path, dtype, new={SCORE}, num_labels=1) if meta else None

        if built is not None:
            model, missing = built
        else:
            with quiet_loading():
                model, info = kind.from_pretrained(
                    path,
                    num_labels=1,
                    dtype=dtype,
                    attn_implementation="eager",
                    output_loading_info=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                )

            missing = info["missing_keys"]

        if lacking := sorted(missing - {SCORE}):
            raise ValueError(f"{path} lacks {len(lacking)} weights of a {head} model, {lacking[0]!r} among them")

        # A causal language model's backbone: the head is new.
        if missing:
            score = model.get_parameter(SCORE).data
            spread = 0.0 if head == "value" else (score.shape[1] + 1) ** -0.5
            score.copy_(torch.randn(score.shape, generator=torch.Generator().manual_seed(0)) * spread)

        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return cls(model, lag=1 if head == "value" else 0)

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenValues:
        """Return one scalar for each token with mask True; the temperature is ignored."""
        states, local, ranks = self.states(batch, self.lag)
        # In float32 for any dtype of the backbone: in bfloat16 100 and 100.4 are equal.
        with torch.autocast(type_of(states.device), enabled=False):
            score: Any = self.model.score
            values = at_least_float32(states) @ at_least_float32(score.weight)[0]
        return TokenValues(*gather_scores((values,), local.counts, ranks.sequence, local.order))

    def save_config(self, folder: Path, words: PreTrainedTokenizerBase) -> None:
        """Write the config also with a padding id, by which transformers finds a sequence's last token."""
        config = self.model.config
        if config.pad_token_id is None:
            # If the tokenizer has none either: eos, which the classifier then skips as padding.
            eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
            config.pad_token_id = eos if words.pad_token_id is None else words.pad_token_id
        super().save_config(folder, words)


class FusedNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) as one kernel; transformers' has seven, its gradient twelve.

    The parameters are the same under the same names. In half precision the result is rounded once, not twice, as in
    the embedded engine.
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm over the last dimension, [..., dim] to [..., dim]."""
        if type_of(hidden_states.device) == "cpu":
            return super().forward(hidden_states)
        weight = self.weight.to(hidden_states.dtype)
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def fuse_norms(model: nn.Module) -> None:
    """Turn the norms of a model into `FusedNorm`, in place; not Gemma's, whose weights are offsets from 1."""
    for module in model.modules():
        kind = type(module)
        if issubclass(kind, FusedNorm):
            continue
        # A subclass of both, so that the module is still an instance of transformers' class.
        if kind.__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = type(kind.__name__, (FusedNorm, kind), {})
