"""Transformers models to train: a policy, a critic or a reward model; packed batch in, scores of its tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
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
from ..types import UNKNOWN_EXPERT, Batch
from .attention import NAME, PackedLayout, gather_scores
from .distributed import Ranks
from .experts import Routers
from .flex import BLOCK, LEAST, Runs, TreeMask
from .linear import ROWS, at_least_float32, speed_up, token_logprobs
from .loading import fill, on_meta
from .lora import SCORE, add_adapters
from .norms import fuse_norms
from .settings import LoraSettings, Parallelism
from .tensor_parallel import parallelize
from .transfer import to_device

if TYPE_CHECKING:
    from .titan import TitanPolicy

Backend = Literal["fsdp", "titan"]
Head = Literal["policy", "value", "reward"]


class TokenScores(NamedTuple):
    """A policy's scores of the tokens with mask True: each [trained], float32, in nats."""

    logprobs: Tensor
    entropy: Tensor


class TokenValues(NamedTuple):
    """A scalar head's values of the tokens with mask True: [trained], float32."""

    values: Tensor


class OwnTokens(NamedTuple):
    """A rank's share of a pack, and the positions whose states it reads. A prefix that sequences share is one run of
    the pack, computed once.

    tokens: [own] ids.
    gathered, positions: [own * tensor-parallel ranks], the tokens of all of those ranks and their positions.
    layout: of the whole pack.
    at: [read], indices of this rank's tokens whose states are read.
    labels: [read], the token ids that they are read for.
    experts: [own, layers, k], those to replay, if any.
    real: number of own tokens that are not padding.
    counts: number of states that each rank reads.
    order: [all that is read], of each token with mask True the index of its state in the order of ranks.
    """

    tokens: Tensor
    gathered: Tensor
    positions: Tensor
    layout: PackedLayout
    at: Tensor
    labels: Tensor
    experts: Tensor | None
    real: int
    counts: list[int]
    order: Tensor


def own_tokens(batch: Batch, lag: int, ranks: Ranks) -> OwnTokens:
    """This rank's share of a batch, whose states are read `lag` tokens before those with mask True."""
    context, sequence, device = ranks.context, ranks.sequence, ranks.device
    tree = find_prefixes(prefix_ids(batch), batch.lengths)
    surplus = padding(len(tree.source), sequence.size, device)
    lengths = tree.lengths + [1] * surplus  # padding: untrained sequences of one token
    parents = tree.parents + [-1] * surplus
    tokens = F.pad(torch.from_numpy(batch.tokens[tree.source]), (0, surplus))
    positions = F.pad(torch.from_numpy(tree.positions), (0, surplus))
    own = tokens.chunk(sequence.size)[sequence.rank]
    first = sequence.rank * len(own)
    real = min(max(len(tree.source) - first, 0), len(own))
    trained = np.flatnonzero(batch.mask)
    read = torch.from_numpy(tree.place[trained - lag])
    rank = read // len(own)
    by_rank = rank.argsort(stable=True)
    mine = (rank == sequence.rank).nonzero()[:, 0]
    columns = {
        "tokens": own,
        "gathered": tokens.chunk(context.size)[context.rank],
        "positions": positions.chunk(context.size)[context.rank],
        "at": read[mine] - first,
        "labels": torch.from_numpy(batch.tokens[trained])[mine],
        "order": torch.empty_like(by_rank).scatter_(0, by_rank, torch.arange(len(by_rank))),
    }
    if batch.experts is not None:
        experts = torch.from_numpy(batch.experts[tree.source[first : first + real]]).long()
        columns["experts"] = F.pad(experts, (0, 0, 0, 0, 0, len(own) - real), value=UNKNOWN_EXPERT)
    runs = None if device.type == "cpu" else Runs.of(lengths, parents)
    if runs is not None:
        columns |= runs.columns()
    on_device = to_device(columns, device)
    if runs is None:
        layout = PackedLayout.of(lengths, device, parents)
    else:
        layout = PackedLayout.masked(TreeMask(runs, *(on_device.pop(name) for name in ("first", "end", "position"))))
    counts = torch.bincount(rank, minlength=sequence.size).tolist()
    return OwnTokens(layout=layout, experts=on_device.pop("experts", None), real=real, counts=counts, **on_device)


def padding(tokens: int, ranks: int, device: torch.device) -> int:
    """The number of tokens to add to a pack of `tokens`, which `ranks` share."""
    if device.type == "cpu":
        return -tokens % lcm(ROWS, ranks)
    return max(tokens, LEAST) + -max(tokens, LEAST) % lcm(BLOCK, ranks) - tokens


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

    def states(self, batch: Batch, lag: int) -> tuple[Tensor, OwnTokens, Ranks]:
        """The backbone's states [read, dim], `lag` tokens before those with mask True, of this rank's tokens."""
        ranks = self.ranks or Ranks(0, 1, next(self.model.parameters()).device, None)
        own = own_tokens(batch, lag, ranks)
        limit, length = rotary_limit(self.model.config), int(batch.lengths.max())
        if limit is not None and length > limit[0]:
            raise ValueError(
                f"a sequence of {length} tokens: beyond {limit[0]} this model's {limit[1]} is not supported"
            )
        if self.routers is not None:
            self.routers.begin(own.experts, own.real)
        hidden = self.model.model(
            input_ids=own.tokens[None],
            position_ids=own.positions[None],
            use_cache=False,
            layout=own.layout,
            context=ranks.context,
        ).last_hidden_state[0]
        return hidden[own.at], own, ranks


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
        `loading.fill` can read are left on the meta device."""
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
        """Log-probability and entropy of each token with mask True."""
        states, own, ranks = self.states(batch, lag=1)  # the state at t - 1 predicts token t
        scores = token_logprobs(states, self.model.lm_head.weight, own.labels, temperature=temperature)
        return TokenScores(*gather_scores(scores, own.counts, ranks.sequence, own.order))


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
                model, found = kind.from_pretrained(
                    path,
                    num_labels=1,
                    dtype=dtype,
                    attn_implementation="eager",
                    output_loading_info=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                )
            missing = found["missing_keys"]
        if others := sorted(missing - {SCORE}):
            raise ValueError(f"{path} lacks {len(others)} weights of a {head} model, {others[0]!r} among them")
        if missing:
            score = model.get_parameter(SCORE).data
            spread = 0.0 if head == "value" else (score.shape[1] + 1) ** -0.5
            score.copy_(torch.randn(score.shape, generator=torch.Generator().manual_seed(0)) * spread)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return cls(model, lag=1 if head == "value" else 0)

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenValues:
        """One scalar for each token with mask True; the temperature is ignored."""
        states, own, ranks = self.states(batch, self.lag)
        # In float32 for any dtype of the backbone: in bfloat16 100 and 100.4 are equal.
        with torch.autocast(states.device.type, enabled=False):
            score: Any = self.model.score
            values = at_least_float32(states) @ at_least_float32(score.weight)[0]
        return TokenValues(*gather_scores((values,), own.counts, ranks.sequence, own.order))

    def save_config(self, folder: Path, words: PreTrainedTokenizerBase) -> None:
        """Also with a padding id, by which transformers finds a sequence's last token."""
        config = self.model.config
        if config.pad_token_id is None:
            # If the tokenizer has none either: eos, which the classifier then skips as padding.
            eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
            config.pad_token_id = eos if words.pad_token_id is None else words.pad_token_id
        super().save_config(folder, words)


def load(path: str | Path, head: Head, **how: Any) -> Policy | ScalarModel:
    """The model of a folder or hub id with this head; `how` is `dtype`, `gradient_checkpointing` and `meta`.

    Raises:
        ValueError: an unknown head, or a model that does not suit it.
    """
    if head == "policy":
        return Policy.from_pretrained(path, **how)
    if head not in ("value", "reward"):
        raise ValueError(f"head must be policy, value or reward, got {head!r}")
    return ScalarModel.from_pretrained(path, head, **how)


def build(
    path: str | Path,
    head: Head,
    ranks: Ranks,
    *,
    backend: Backend = "fsdp",
    seq_len: int = 4096,
    lora: LoraSettings | None = None,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile: bool = False,
) -> Policy | ScalarModel | TitanPolicy:
    """The model ready to train on the device of `ranks`: loaded, with adapters, sharded and compiled.

    Where there is a mesh, each rank reads only its part of the weights (see `loading.on_meta`).

    Args:
        backend: "fsdp" is a transformers model with this library's parallelisation, "titan" TorchTitan's.
        seq_len: of the longest sequence.
        dtype: of the forward and backward pass.
        weights_dtype: of the parameters.
        compile: each decoder layer; with `gradient_checkpointing` its norms and feed-forward.

    Raises:
        ValueError: an unknown backend or head, an unsuitable model, sizes that are not a multiple of a degree, or
            invalid adapters.
        ImportError: TorchTitan is not installed.
    """
    common: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing}
    if backend == "titan":
        if head != "policy" or lora is not None or weights_dtype != torch.float32:
            raise ValueError(
                "trainer.backend titan trains all weights of policies, in float32: use fsdp for adapters, heads and "
                "bfloat16 weights"
            )
        from .titan import build_titan

        return build_titan(
            path, ranks, seq_len=seq_len, dtype=dtype, cpu_offload=cpu_offload, compile=compile, **common
        )
    if backend != "fsdp":
        raise ValueError(f"trainer.backend must be fsdp or titan, got {backend!r}")
    policy = load(path, head, dtype=weights_dtype, meta=ranks.mesh is not None, **common)
    degrees = Parallelism(tensor_parallel_degree=ranks.tensor.size, context_parallel_degree=ranks.context.size)
    degrees.check(policy.model.config)
    if lora is not None:
        add_adapters(policy.model, lora)
    if ranks.tensor.size > 1:
        parallelize(policy.model, ranks)
    layers = list(policy.model.model.layers)
    if compile:
        for layer in layers:
            # A checkpointed layer does not trace across the graph break of its attention, only the parts around it.
            parts = [part for name, part in layer.named_children() if name != "self_attn"]
            for part in parts if gradient_checkpointing else (layer,):
                part.compile(dynamic=True)
    policy.ranks = ranks
    policy.train()
    if ranks.mesh is None:
        return policy.to(ranks.device)
    # FSDP2: one group per decoder layer, one for embedding, final norm and head (which may be tied).
    mesh = ranks.mesh[tuple(name for name in ranks.mesh.mesh_dim_names or () if name != "tensor")]
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    fill(policy.model, path, torch.device("cpu") if cpu_offload else ranks.device)
    sum_gradients(policy)
    return policy


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 sum gradients, not average them: weights of the loss are already shares of the whole batch."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can only sum


def reduce_over_copies(model: nn.Module, ranks: Ranks, now: bool) -> None:
    """Have the next backward pass sum gradients over the copies of shards (HSDP), or leave that to a later one of the
    same update: a network between hosts carries them once.

    Not of a mixture of experts: what the later pass does not use, it would not sum.
    """
    copies = ranks.mesh is not None and "replicate" in (ranks.mesh.mesh_dim_names or ())
    if copies and getattr(model, "routers", None) is None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_all_reduce(now, recurse=False)


def reshard(model: nn.Module) -> None:
    """Drop what a forward pass without a backward pass leaves in place of parameters: gathered copies, in its dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def precision(ranks: Ranks, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """What a forward pass in `dtype` runs in: autocast in one process; FSDP2 has its own mixed precision."""
    mixed = dtype != torch.float32 and ranks.mesh is None
    return torch.autocast(ranks.device.type, dtype) if mixed else nullcontext()


def round_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold the matrices of linear layers in `dtype`, as autocast rounds them at every product: half the memory for the
    same results. Embeddings (and a head that is tied to them), norms, biases and experts stay as they are."""
    embedding = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight not in embedding:
            module.weight.data = module.weight.data.to(dtype)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass: bfloat16 only where the device computes in it."""
    if name == "bfloat16" and device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        print("training.dtype: this CPU has no bfloat16 arithmetic; computing in float32")
        return torch.float32
    return getattr(torch, name)
