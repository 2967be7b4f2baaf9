"""TorchTitan's Llama 3 and Qwen3 at the sizes of a Hugging Face checkpoint, and under its names.

This file and `titan.py` are all that knows TorchTitan; nothing of its `experiments` is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from . import titan_setup
from .distributed import Group
from .packed_attention import PackedLayout, packed_attention
from .token_logprobs import token_logprobs

titan_setup.prepare()

# isort: split
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

FAMILIES = {"llama": (Llama3Model, Llama3TransformerBlock), "qwen3": (Qwen3Model, Qwen3TransformerBlock)}

assert tuple(FAMILIES) == titan_setup.FAMILIES

READ = {"weight": skip_param_init}  # from the checkpoint: nothing is drawn

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
}


def plain_name(name: str) -> str:
    """The Hugging Face name of one of TorchTitan's parameters."""
    module, _, kind = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "").rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    _layers, index, inner = module.split(".", 2)
    return f"model.layers.{index}.{_LAYER[inner]}.{kind}"


class PackedAttention(Module):
    """`packed_attention` where TorchTitan has its own; the names of the arguments are its sharding contract."""

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
        attention_masks: tuple[PackedLayout, Group],
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, tokens, heads, head_dim] in and out."""
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        layout, context = attention_masks
        return packed_attention(self, q, k, v, scaling=scale, layout=layout, context=context)[0]


class Head(Linear):
    """The head for some tokens, each [tokens]: their log-probabilities and entropies. It has to be called as the module
    that it is, for FSDP2 to bring its weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, states: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """states: [tokens, dim]."""
        return token_logprobs(states, shared(self.weight), labels, temperature=temperature)


def shared(tensor: Tensor) -> Tensor:
    """All of what tensor-parallel ranks share; each goes on with tokens of its own, so that gradients are summed."""
    return tensor.full_tensor(grad_placements=[Partial()]) if isinstance(tensor, DTensor) else tensor


class Rotary(CosSinRoPE):
    """The rotary embedding of a transformers config, whatever its scaling."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        of: Any

    def _precompute_cache(self) -> Tensor:
        positions = torch.arange(self.config.max_seq_len)
        cos, sin = LlamaRotaryEmbedding(self.config.of)(torch.zeros(()), positions[None])
        return torch.cat([cos, sin], dim=-1)[0]


def titan_config(of: Any, seq_len: int) -> Decoder.Config:
    """TorchTitan's configuration of a transformers one, for sequences of up to `seq_len` tokens.

    ValueError: see `forge.training.titan_setup.check_model`.
    """
    titan_setup.check_model(of)
    dim, head = of.hidden_size, getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
    model, block = FAMILIES[of.model_type]

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=of.rms_norm_eps, param_init=READ)

    def layer() -> Any:
        attention = make_gqa_config(
            dim=dim,
            n_heads=of.num_attention_heads,
            n_kv_heads=of.num_key_value_heads,
            head_dim=head,
            wqkv_param_init=READ,
            wo_param_init=READ,
            inner_attention=PackedAttention.Config(),
            rope=Rotary.Config(dim=head, max_seq_len=min(seq_len, of.max_position_embeddings), of=of),
            qk_norm=norm(head) if of.model_type == "qwen3" else None,
        )
        feed_forward = make_ffn_config(
            dim=dim, hidden_dim=of.intermediate_size, w1_param_init=READ, w2w3_param_init=READ
        )
        return block.Config(
            attention=attention, feed_forward=feed_forward, attention_norm=norm(dim), ffn_norm=norm(dim)
        )

    return model.Config(
        dim=dim,
        vocab_size=of.vocab_size,
        enable_weight_tying=of.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=of.vocab_size, embedding_dim=dim, param_init=READ),
        norm=norm(dim),
        lm_head=Head.Config(in_features=dim, out_features=of.vocab_size, param_init=READ),
        layers=[layer() for _ in range(of.num_hidden_layers)],
    )
