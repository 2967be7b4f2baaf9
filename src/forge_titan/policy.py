"""TorchTitan's Llama 3, Qwen3 and Qwen3-MoE as a policy, behind the interface of `forge.training.policy`.

Only the model's computation and its sharding come from TorchTitan. Data, loss, optimiser and checkpoints are
`PolicyTrainer`'s, so that both backends train the same way. Nothing of TorchTitan's `experiments` is used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import GENERATION_CONFIG_NAME

from forge.models.architecture import sparse_layers
from forge.models.files import read_json
from forge.models.weight_layouts import split_experts
from forge.training.attention import PackedLayout, gather_scores, packed_attention
from forge.training.distributed import RankGroup, Ranks
from forge.training.experts import Routers
from forge.training.linear import token_logprobs
from forge.training.policy import RankTokens, TokenScores, rank_tokens
from forge.types import Batch

from . import setup as titan_setup

titan_setup.prepare_imports()

# isort: split
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

FAMILIES = {
    "llama": (Llama3Model, Llama3TransformerBlock),
    "qwen3": (Qwen3Model, Qwen3TransformerBlock),
    "qwen3_moe": (Qwen3Model, Qwen3TransformerBlock),
}
assert tuple(FAMILIES) == titan_setup.FAMILIES

READ = {"weight": skip_param_init}  # weights come from the checkpoint: no random values are drawn

_OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
_LAYER = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "moe.router.gate": "mlp.gate",
}
_EXPERTS = "moe.routed_experts.inner_experts"


def plain_name(name: str) -> str:
    """Return the Hugging Face name of a parameter of TorchTitan's; of stacked experts, transformers' name."""
    module, _, kind = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "").rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    _layers, index, inner = module.split(".", 2)
    if inner == _EXPERTS:
        return f"model.layers.{index}.mlp.experts.{kind}"
    return f"model.layers.{index}.{_LAYER[inner]}.{kind}"


class PackedAttention(Module):
    """Attention by `packed_attention`, instead of TorchTitan's, whose sharding needs these names of the arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: tuple[PackedLayout, RankGroup],
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the attention of query, key and value, [1, tokens, heads, head_dim] each."""
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        layout, context = attention_masks
        return packed_attention(self, q, k, v, scaling=scale, layout=layout, context=context)[0]


class TitanExperts(Module):
    """The experts of a layer, stacked as in transformers; TorchTitan's own compute in bfloat16 whatever the dtype.
    E: experts, D: width."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = E = config.num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * config.hidden_dim, config.dim))
        self.down_proj = nn.Parameter(torch.empty(E, config.dim, config.hidden_dim))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs [rows, D] of this rank's experts for x [rows, D], in the experts' order; `counts`
        [own experts] is the number of rows of each."""
        gate_up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate_up_proj, self.down_proj))
        # The kernel of all experts is for bfloat16 only.
        if x.is_cuda and x.dtype == torch.bfloat16:
            ends = counts.cumsum(0, dtype=torch.int32)
            gate, up = F.grouped_mm(x, gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
            return F.grouped_mm(F.silu(gate) * up, down.transpose(-2, -1), offs=ends)
        outputs = []
        for rows, expert_gate_up, expert_down in zip(x.split(counts.tolist()), gate_up, down, strict=True):
            gate, up = F.linear(rows, expert_gate_up).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, expert_down))
        return torch.cat(outputs)


class TitanRouters(Routers):
    """`Routers` for TorchTitan's routers, which return gates, experts and probabilities, [1, tokens, ...] each."""

    def _record_choice(
        self, number: int, _router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        gates, experts, probabilities = (tensor[0] for tensor in output)
        # In float32, as TorchTitan's autocast to float32 does nothing on a CPU.
        gates, experts = self.route(number, probabilities.float(), gates, experts)
        return gates[None], experts[None], output[2]


class TitanHead(Linear):
    """The head, which scores tokens instead of returning logits. It is a module so that FSDP2 gathers its weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, states: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [tokens] each, for `states` [tokens, dim] and `labels` [tokens]."""
        return token_logprobs(states, full_tensor(self.weight), labels, temperature=temperature)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered if it is sharded. Gradients are summed over ranks, which have different tokens."""
    return tensor.full_tensor(grad_placements=[Partial()]) if isinstance(tensor, DTensor) else tensor


class TitanRotary(CosSinRoPE):
    """The rotary embedding of a transformers config, with any scaling."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        model_config: PreTrainedConfig

    def _precompute_cache(self) -> Tensor:
        positions = torch.arange(self.config.max_seq_len)
        cos, sin = LlamaRotaryEmbedding(self.config.model_config)(torch.zeros(()), positions[None])
        return torch.cat([cos, sin], dim=-1)[0]


def titan_config(config: PreTrainedConfig, seq_len: int) -> Decoder.Config:
    """Return TorchTitan's configuration for a transformers one and sequences of up to `seq_len` tokens.

    Raises:
        ValueError: TorchTitan does not support a feature of the model.
    """
    titan_setup.check_model(config)
    dim = config.hidden_size
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    model, block = FAMILIES[config.model_type]
    sparse = sparse_layers(config)

    def make_norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps, param_init=READ)

    def make_mixture() -> MoE.Config:
        E, k = config.num_experts, config.num_experts_per_tok
        read = dict.fromkeys(("gate_up_proj", "down_proj"), skip_param_init)
        experts: Any = TitanExperts.Config(
            dim=dim, hidden_dim=config.moe_intermediate_size, num_experts=E, param_init=read
        )
        # Of TorchTitan's mixture only the exchange of tokens and the sums remain.
        tokens = make_token_dispatcher_config(num_experts=E, top_k=k, comm_backend="standard")
        router = {"top_k": k, "score_func": "softmax", "route_norm": config.norm_topk_prob}
        return make_moe_config(
            num_experts=E,
            router=make_router_config(dim=dim, num_experts=E, gate_param_init=READ, **router),
            routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=tokens),
            load_balance_coeff=None,  # no update of biases: Qwen3 is trained with `forge.training.experts.balance_loss`
        )

    max_seq_len = min(seq_len, config.max_position_embeddings)

    def make_layer(index: int) -> Module.Config:
        # A layer, with this library's attention, rotary embedding and experts instead of TorchTitan's.
        return block.Config(
            attention=make_gqa_config(
                dim=dim,
                n_heads=config.num_attention_heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=head,
                wqkv_param_init=READ,
                wo_param_init=READ,
                inner_attention=PackedAttention.Config(),
                rope=TitanRotary.Config(dim=head, max_seq_len=max_seq_len, model_config=config),
                qk_norm=make_norm(head) if config.model_type != "llama" else None,
            ),
            feed_forward=None
            if index in sparse
            else make_ffn_config(
                dim=dim, hidden_dim=config.intermediate_size, w1_param_init=READ, w2w3_param_init=READ
            ),
            moe=make_mixture() if index in sparse else None,
            attention_norm=make_norm(dim),
            ffn_norm=make_norm(dim),
        )

    return model.Config(
        dim=dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=dim, param_init=READ),
        norm=make_norm(dim),
        lm_head=TitanHead.Config(in_features=dim, out_features=config.vocab_size, param_init=READ),
        layers=[make_layer(index) for index in range(config.num_hidden_layers)],
    )


class TitanPolicy(nn.Module):
    """A causal language model of TorchTitan.

    Args:
        model: already sharded over `ranks`.
        folder: the Hugging Face checkpoint that it was read from.
    """

    routers: TitanRouters | None = None  # of a mixture of experts
    plain_weights = staticmethod(split_experts)

    def __init__(self, model: Decoder, folder: Path, ranks: Ranks) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks
        self.config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        file = folder / GENERATION_CONFIG_NAME
        self.generation = GenerationConfig.from_dict(read_json(file)) if file.exists() else None
        model._skip_lm_head = True  # `forward` computes the head for trained tokens only
        if sparse := sparse_layers(self.config):
            layers: dict[str, Any] = dict(model.layers.items())
            routers = {i: layers[str(i)].moe.router for i in sparse}
            self.routers = TitanRouters(routers, self.config.num_experts_per_tok, self.config.norm_topk_prob)

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Return log-probability and entropy of each token with mask True, at the sampler's `temperature`."""
        local = rank_tokens(batch, 1, self.ranks)  # the state at t - 1 predicts token t
        if self.routers is not None:
            self.routers.begin(local.experts, local.real)
        hidden = self.model(local.gathered[None], local.positions[None], (local.layout, self.ranks.context))
        return TokenScores(*self.score_states(hidden, local, temperature))

    def score_states(self, hidden: Tensor, local: RankTokens, temperature: float) -> tuple[Tensor, ...]:
        """Return the fields of `TokenScores` for the last states [1, tokens, dim] of this rank's share of a batch."""
        states = full_tensor(hidden)[0].chunk(self.ranks.tensor.size)[self.ranks.tensor.rank]
        scores = self.model.lm_head(states[local.state_indices], local.labels, temperature)
        return gather_scores(scores, local.counts, self.ranks.sequence, local.order)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (Hugging Face name, parameter) pairs: of a sharded model DTensors, of tied parameters the first."""
        return ((plain_name(name), parameter) for name, parameter in self.model.named_parameters())

    def save_config(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the configuration files in Hugging Face format, without weights and tokenizer."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, trust_remote_code=False)
        if self.generation is not None:
            model.generation_config = self.generation
        model.save_pretrained(folder, state_dict={})
