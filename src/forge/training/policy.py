"""Transformers models to train: a policy, a critic or a reward model; packed batch in, scores of its tokens out.

RMSNorm is one kernel where a device has one.
"""

from collections.abc import Callable, Iterable, Iterator
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..config.plugin import resolve
from ..data.chat import ChatFormat
from ..data.prefixes import find_prefixes, prefix_ids
from ..models.architecture import check_config, is_native, rotary_limit, sparse_layers
from ..models.find import check_classifier, quiet_loading
from ..models.tokenizer import model_class
from ..models.weight_layouts import split_experts
from ..system.devices import type_of
from ..types import UNKNOWN_EXPERT, Batch
from .attention import EXACT, NAME, PackedLayout, gather_scores
from .distributed import Ranks, to_device
from .experts import Routers
from .flex import BLOCK, MIN_TOKENS, Runs, TreeMask
from .linear import ROWS, at_least_float32, speed_up, token_logprobs
from .loading import build_on_meta
from .lora import SCORE
from .settings import Head


class TokenScores(NamedTuple):
    """Log-probabilities and entropies of the tokens with mask True under a policy: each [trained], float32, in nats."""

    logprobs: Tensor
    entropy: Tensor


class TokenValues(NamedTuple):
    """A scalar head's values of the tokens with mask True: [trained], float32."""

    values: Tensor


class RankTokens(NamedTuple):
    """Share of a rank in the tokens of a pack, and the tokens whose states the rank reads.

    A pack is a batch in which each prefix that sequences share comes once. Ranks divide its tokens equally.

    tokens: [local] ids.
    gathered, positions: [local * tensor-parallel ranks], the tokens of all tensor-parallel ranks and their positions.
    layout: of the whole pack.
    state_indices: [read], indices of this rank's tokens whose states are read.
    labels: [read], for each of these states the id of the token that it scores.
    experts: [local, layers, k], the experts to replay; None: route freely.
    real: number of local tokens that are not padding.
    counts: number of states that each rank reads.
    order: [trained], for each token with mask True the index of its state in the states of all ranks, rank after rank.
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
    """Return this rank's share of a batch, whose states are read `lag` tokens before the tokens with mask True."""
    context, sequence, device = ranks.context, ranks.sequence, ranks.device

    # The pack of all ranks: the batch with each shared prefix once, padded.
    tree = find_prefixes(prefix_ids(batch), batch.lengths)
    padding = count_padding(len(tree.source), sequence.size, device)
    lengths = tree.lengths + [1] * padding  # padding: untrained sequences of one token
    parents = tree.parents + [-1] * padding
    tokens = F.pad(torch.from_numpy(batch.tokens[tree.source]), (0, padding))
    positions = F.pad(torch.from_numpy(tree.positions), (0, padding))

    # This rank's tokens, without the padding of the last rank.
    rank_ids = tokens.chunk(sequence.size)[sequence.rank]
    first_index = sequence.rank * len(rank_ids)  # of this rank's tokens, in the pack
    real_count = min(max(len(tree.source) - first_index, 0), len(rank_ids))

    # Each trained token is scored by a state, an index of the pack, which one of the ranks has.
    trained_tokens = np.flatnonzero(batch.mask)
    state_indices = torch.from_numpy(tree.index[trained_tokens - lag])
    rank_of_state = state_indices // len(rank_ids)
    by_rank = rank_of_state.argsort(stable=True)  # the order of the ranks' states, gathered rank after rank
    rank_reads = (rank_of_state == sequence.rank).nonzero()[:, 0]
    labels = batch.tokens if batch.targets is None else batch.targets
    columns = {
        "tokens": rank_ids,
        "gathered": tokens.chunk(context.size)[context.rank],
        "positions": positions.chunk(context.size)[context.rank],
        "state_indices": state_indices[rank_reads] - first_index,
        "labels": torch.from_numpy(labels[trained_tokens])[rank_reads],
        "order": torch.empty_like(by_rank).scatter_(0, by_rank, torch.arange(len(by_rank))),  # the inverse of by_rank
    }

    if batch.experts is not None:
        experts = torch.from_numpy(batch.experts[tree.source[first_index : first_index + real_count]]).long()
        columns["experts"] = F.pad(experts, (0, 0, 0, 0, 0, len(rank_ids) - real_count), value=UNKNOWN_EXPERT)

    # All tensors go to the device in one copy, including an accelerator's mask.
    runs = None if type_of(device) == "cpu" else Runs.from_lengths(lengths, parents)
    if runs is not None:
        columns |= runs.columns()
    on_device = to_device(columns, device)
    if runs is None:
        layout = PackedLayout.from_lengths(lengths, device, parents)
    else:
        layout = PackedLayout.masked(TreeMask(runs, *(on_device.pop(name) for name in ("first", "end", "position"))))

    counts = torch.bincount(rank_of_state, minlength=sequence.size).tolist()
    return RankTokens(
        layout=layout, experts=on_device.pop("experts", None), real=real_count, counts=counts, **on_device
    )


def count_padding(tokens: int, ranks: int, device: torch.device) -> int:
    """Return the number of tokens by which a pack of `tokens` is padded, so that `ranks` share it equally and kernels
    see few different sizes.

    >>> count_padding(100, ranks=2, device=torch.device("cpu"))
    28
    """
    if type_of(device) == "cpu":
        return -tokens % lcm(ROWS, ranks)
    minimum = max(tokens, MIN_TOKENS)
    return minimum - tokens + -minimum % lcm(BLOCK, ranks)


class PackedModel(nn.Module):
    """A transformers model over packed batches.

    A trainer uses only `forward`, `named_weights`, `save_config` and the parameters.
    """

    model: PreTrainedModel
    ranks: Ranks | None = None  # None: one process, on the model's device
    routers: Routers | None = None  # of a policy that is a mixture of experts
    exact = False  # whether log-probabilities have the engine's bits
    # From pairs (name, tensor) of `named_weights` those that checkpoints on the hub have.
    plain_weights: Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] = staticmethod(split_experts)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        check_config(model.config)
        self.adopt(model, NAME)

    def adopt(self, model: PreTrainedModel, attention: str) -> None:
        """Use a model from now on, and set its transformers attention implementation to the given name."""
        model.config._attn_implementation = attention
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                # Off in training as well: a ratio or a KL compares two forward passes, in which dropout would differ.
                module.p = 0.0
        speed_up(model)
        fuse_norms(model)
        self.model = model

    def use_exact(self) -> None:
        """Compute attention and log-probabilities with bits identical to the engine's from now on."""
        self.model.config._attn_implementation = EXACT
        self.exact = True

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (Hugging Face name, parameter) pairs: of a sharded model DTensors, of tied parameters the first."""
        return self.model.named_parameters()

    def save_config(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the configuration files in Hugging Face format, without weights and tokenizer.

        By them generation also stops at the tokens that end a turn of the tokenizer's chat template.
        """
        if tokenizer.chat_template and (generation := self.model.generation_config) is not None:
            eos = [] if generation.eos_token_id is None else generation.eos_token_id
            generation.eos_token_id = [
                *dict.fromkeys(np.append(eos, ChatFormat(tokenizer).stop_ids).astype(int).tolist())
            ] or None
        self.model.save_pretrained(folder, state_dict={})

    def states(self, batch: Batch, lag: int) -> tuple[Tensor, RankTokens, Ranks]:
        """Return the backbone's states [read, dim] that this rank reads, with its tokens and the ranks.

        The states are at the tokens `lag` before those with mask True.

        Raises:
            ValueError: a sequence is too long for the model's rotary embedding.
        """
        ranks = self.ranks or Ranks(0, 1, next(self.model.parameters()).device, None)
        local = rank_tokens(batch, lag, ranks)
        limit = rotary_limit(self.model.config)
        length = int(batch.lengths.max())
        if limit is not None and length > limit[0]:
            raise ValueError(
                f"a sequence of {length} tokens is too long: this model's {limit[1]} is supported up to {limit[0]} "
                "tokens"
            )

        if self.routers is not None:
            self.routers.begin(local.experts, local.real)
        hidden = self.model.base_model(
            input_ids=local.tokens[None],
            position_ids=local.positions[None],
            use_cache=False,
            layout=local.layout,
            context=ranks.context,
        ).last_hidden_state[0]

        return hidden[local.state_indices], local, ranks


class Policy(PackedModel):
    """A causal language model that scores the tokens of a batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config: Any = model.config
        if config.tie_word_embeddings and model.lm_head.weight is not model.model.embed_tokens.weight:
            raise ValueError(
                "lm_head.weight differs from embed_tokens.weight, although tie_word_embeddings is true: set it to false"
            )
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
    ) -> "Policy":
        """Load a model with weights in `dtype` from a folder or a hub id (see `forge.models.resolve_model`).

        Args:
            meta: leave the weights that `loading.fill_model` can read on the meta device, without memory.
        """
        kind = model_class(AutoConfig.from_pretrained(path, trust_remote_code=False))
        built = build_on_meta(kind, path, dtype) if meta else None
        if built is not None:
            model, _ = built
        else:
            model = kind.from_pretrained(
                path, dtype=dtype, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
            )

        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return make_policy(model)

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Return log-probability and entropy of each token with mask True, at the sampler's `temperature`."""
        states, local, ranks = self.states(batch, lag=1)  # the state at t - 1 predicts token t
        head = self.model.lm_head.weight
        scores = token_logprobs(states, head, local.labels, temperature=temperature, exact=self.exact)
        return TokenScores(*gather_scores(scores, local.counts, ranks.sequence, local.order))


def make_policy(model: PreTrainedModel) -> Policy:
    """Return the policy of a causal language model of any family."""
    return Policy(model) if is_native(model.config) else resolve("forge_families.probe:make_policy", "model")(model)


class ScalarModel(PackedModel):
    """A transformers sequence classifier of one class: a critic or a reward model.

    Args:
        lag: how many tokens before a token its scalar is read: 1 for a critic, whose value of a state must not depend
            on the action taken in it; 0 for a reward model, which transformers reads at a sequence's last token.
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
    ) -> "ScalarModel":
        """Load a sequence classifier, or the backbone of a causal language model with a new head, in `dtype`.

        A new head is 0 for a critic, and for a reward model has variance 1 / (dim + 1) (Stiennon et al. 2020), equal on
        every rank and in every run. `meta` is as in `Policy.from_pretrained`.

        Raises:
            ValueError: a classifier of several classes, or weights other than the head are missing.
        """
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_classifier(config)
        if any("SequenceClassification" in name for name in config.architectures or ()) and config.num_labels != 1:
            raise ValueError(f"{path} has {config.num_labels} classes, but a {head} model needs num_labels = 1")

        model_class = AutoModelForSequenceClassification
        built = build_on_meta(model_class, path, dtype, new={SCORE}, num_labels=1) if meta else None

        if built is not None:
            model, missing = built
        else:
            with quiet_loading():
                model, info = model_class.from_pretrained(
                    path,
                    num_labels=1,
                    dtype=dtype,
                    attn_implementation="eager",
                    output_loading_info=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                )

            missing = info["missing_keys"]

        if absent := sorted(missing - {SCORE}):
            raise ValueError(f"{path} lacks {len(absent)} weights of a {head} model, {absent[0]!r} among them")

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

    def save_config(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the config also with a padding id, by which transformers finds a sequence's last token."""
        config = self.model.config
        if config.pad_token_id is None:
            # If the tokenizer has none either: eos, which the classifier then skips as padding.
            eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
            config.pad_token_id = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        super().save_config(folder, tokenizer)


class FusedNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) as one kernel; transformers' has seven, its gradient twelve.

    The parameters are the same under the same names. In half precision the result is rounded once, not twice, as in
    the embedded engine.
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `hidden_states` [..., dim], normalised over the last dimension."""
        if type_of(hidden_states.device) == "cpu":
            return super().forward(hidden_states)
        weight = self.weight.to(hidden_states.dtype)
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def fuse_norms(model: nn.Module) -> None:
    """Make each RMSNorm of a model a `FusedNorm`, in place; not Gemma's, whose weights are offsets from 1."""
    for module in model.modules():
        kind = type(module)
        # Gemma's have no `variance_epsilon`. A subclass of both: it is still an instance of transformers' class.
        is_norm = kind.__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
        if is_norm and not issubclass(kind, FusedNorm):
            module.__class__ = type(kind.__name__, (FusedNorm, kind), {})
