"""TorchTitan's Llama 3 and Qwen3 as a policy, behind the interface of `forge.training.policy`.

Only how a model computes and how it is sharded comes from TorchTitan: data, loss, optimiser and checkpoints are those
of `PolicyTrainer`, so that both backends train the same way. Nothing of its `experiments` is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Partial
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import GENERATION_CONFIG_NAME

from ..types import Batch
from . import titan_setup
from .attention import PackedLayout, gather_scores, packed_attention
from .distributed import Group, Ranks
from .linear import token_logprobs
from .policy import TokenScores, own_tokens, sum_gradients

titan_setup.prepare()

# isort: split
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

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
    """`packed_attention` in place of TorchTitan's; its sharding contract names the arguments."""

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
    """Log-probabilities and entropies of some tokens, each [tokens]. A module, so that FSDP2 gathers its weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, states: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """states: [tokens, dim]."""
        return token_logprobs(states, shared(self.weight), labels, temperature=temperature)


def shared(tensor: Tensor) -> Tensor:
    """The whole of a tensor-parallel tensor. Each rank uses it for tokens of its own: gradients are summed."""
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

    Raises:
        ValueError: see `forge.training.titan_setup.check_model`.
    """
    titan_setup.check_model(of)
    dim, head = of.hidden_size, getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
    model, block = FAMILIES[of.model_type]

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=of.rms_norm_eps, param_init=READ)

    def layer() -> Any:
        return block.Config(
            attention=make_gqa_config(
                dim=dim,
                n_heads=of.num_attention_heads,
                n_kv_heads=of.num_key_value_heads,
                head_dim=head,
                wqkv_param_init=READ,
                wo_param_init=READ,
                inner_attention=PackedAttention.Config(),
                rope=Rotary.Config(dim=head, max_seq_len=min(seq_len, of.max_position_embeddings), of=of),
                qk_norm=norm(head) if of.model_type == "qwen3" else None,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=of.intermediate_size, w1_param_init=READ, w2w3_param_init=READ
            ),
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
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


class TitanPolicy(nn.Module):
    """A causal language model of TorchTitan.

    Args:
        model: already divided as `ranks` are.
        folder: the Hugging Face checkpoint that it was read from.
    """

    routers: None = None  # as `policy.PackedModel` has them of a mixture of experts

    def __init__(self, model: Decoder, folder: Path, ranks: Ranks) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks
        self.config = AutoConfig.from_pretrained(folder)
        stated = (folder / GENERATION_CONFIG_NAME).exists()
        self.generation = GenerationConfig.from_pretrained(folder) if stated else None
        model._skip_lm_head = True  # it is computed for trained tokens alone

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Log-probability and entropy of each token with mask True."""
        own = own_tokens(batch, 1, self.ranks)  # the state at t - 1 predicts token t
        hidden = self.model(own.gathered[None], own.positions[None], (own.layout, self.ranks.context))
        states = shared(hidden)[0].chunk(self.ranks.tensor.size)[self.ranks.tensor.rank]
        scores = self.model.lm_head(states[own.at], own.labels, temperature)
        return TokenScores(*gather_scores(scores, own.counts, self.ranks.sequence, own.order))

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, this rank's part), a DTensor where it is sharded; of tied parameters the first."""
        return ((plain_name(name), parameter) for name, parameter in self.model.named_parameters())

    def save_config(self, folder: Path, words: PreTrainedTokenizerBase) -> None:
        """Write all but weights and tokenizer in Hugging Face format."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        if self.generation is not None:
            model.generation_config = self.generation
        model.save_pretrained(folder, state_dict={})


def build_titan(
    path: str | Path,
    ranks: Ranks,
    *,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile: bool = False,
) -> TitanPolicy:
    """The model of a local folder ready to train on the device of `ranks`; arguments as of `build`.

    No rank ever holds the whole model: it is sharded before it is read.

    Raises:
        ValueError: TorchTitan lacks the model, or a size is no multiple of a degree.
    """
    config = AutoConfig.from_pretrained(path)
    sizes, checkpointing = titan_config(config, seq_len), FullAC.Config().build(dump_folder="")
    with torch.device("meta"):
        if ranks.mesh is None:
            model = sizes.build()
            if gradient_checkpointing:
                checkpointing.apply(model)
        else:
            degrees = dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True))
            parallelism = ParallelismConfig(
                data_parallel_replicate_degree=degrees.get("replicate", 1),
                # Context parallelism is in `PackedAttention`; to the weights it is data parallelism.
                data_parallel_shard_degree=degrees["shard"],
                tensor_parallel_degree=degrees.get("tensor", 1),
                spmd_backend="partial_dtensor",  # the default does not work with torch 2.13's fully_shard
            )
            sizes.update_from_config(config=SimpleNamespace(parallelism=parallelism))
            # The head sees this rank's trained tokens alone: only its weight is sharded, not its input.
            head = sizes.lm_head.sharding_config
            sizes.lm_head.sharding_config = ShardingConfig(state_shardings=head.state_shardings)
            model = sizes.build()
            places = ParallelDims.from_config(parallelism, ranks.world_size)
            if places.tp_enabled:
                model.parallelize(places)
                if config.tie_word_embeddings:
                    # TorchTitan shards each by itself; FSDP2 has to see that they are one.
                    model.tok_embeddings.weight = model.lm_head.weight
            if gradient_checkpointing:
                checkpointing.apply(model)
            apply_fsdp_to_decoder(
                model,
                places.get_mesh(["dp_replicate", "fsdp"] if places.dp_replicate_enabled else ["fsdp"]),
                param_dtype=dtype,
                reduce_dtype=torch.float32,
                pp_enabled=False,
                cpu_offload=cpu_offload,
            )
    model.to_empty(device="cpu" if cpu_offload else ranks.device)
    model.init_states(buffer_device=ranks.device)
    read = {plain_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=ranks.world_size == 1)
    sum_gradients(model)
    if compile:
        for layer in model.layers.values():
            layer.compile(dynamic=True)
    return TitanPolicy(model, Path(path), ranks).train()
