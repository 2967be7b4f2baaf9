"""Every field of every family's configuration: does trainer and engine compute what transformers computes?

A field is tried on every family, also those whose class does not have it: a config.json may have any
key. What transformers itself computes is the oracle: its eager attention, one sequence at a time.
"""

import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from forge.data.packing import pack
from forge.engines import EmbeddedEngine
from forge.training.policy import Policy
from forge.types import Episode, Sampling

VOCAB = 61
# A prompt only, prompts beyond every window, and some that share a prefix.
SEQUENCES = [[5, 6], [7 + i * i % 40 for i in range(30)], [9] * 6 + [3 + i for i in range(20)], [9] * 6 + [50, 51, 52]]
LENGTH = 36  # of the longest with its completion
TOLERANCE = 1e-4
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 9},
    "smollm3": {"no_rope_layer_interval": 2},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 7, "sliding_window_pattern": 2},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, **EXPERTS},
    "olmoe": EXPERTS,
}
DEFAULT, THETA = {"rope_type": "default"}, {"rope_theta": 10000.0}
FACTORS = {"short_factor": [1.5, 2.0, 1.0, 3.0], "long_factor": [3.0, 4.0, 2.0, 5.0]}
ROPES: list[dict[str, Any]] = [
    {**DEFAULT, "rope_theta": 100.0},
    {**DEFAULT, **THETA, "partial_rotary_factor": 0.5},
    {**THETA, "rope_type": "linear", "factor": 3.0},
    {**THETA, "rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    {**THETA, "rope_type": "dynamic", "factor": 3.0},
    {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {**THETA, "rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, "beta_fast": 8.0, "beta_slow": 2.0},
    {**THETA, "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False},
    {
        **{**THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    },
    {**THETA, **FACTORS, "rope_type": "longrope", "original_max_position_embeddings": 40, "factor": 2.0},
    {**THETA, **FACTORS, "rope_type": "longrope", "original_max_position_embeddings": 16, "attention_factor": 1.5},
    {**THETA, "rope_type": "proportional", "partial_rotary_factor": 0.5},
]
NESTED = [{"full_attention": ROPES[0], "sliding_attention": rope} for rope in (ROPES[0], ROPES[2], ROPES[4], ROPES[5])]
WINDOWS = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
# Other values of each field, only or with what makes them matter. A field of a family without an entry is an error.
VALUES: dict[str, list[Any]] = {
    "architectures": [["OtherForCausalLM"]],
    "attention_bias": [True],
    "attention_dropout": [0.5],
    "attn_logit_softcapping": [2.0],
    "bos_token_id": [4],
    "chunk_size_feed_forward": [4],
    "clip_qkv": [0.5],
    "decoder_sparse_step": [2],
    "dtype": ["bfloat16", "float16"],
    "embd_pdrop": [0.5],
    "eos_token_id": [4, [4, 5]],
    "final_logit_softcapping": [2.0],
    "head_dim": [16, None],
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh"],
    "hidden_activation": ["gelu", "silu"],
    "hidden_size": [64],
    "id2label": [{0: "right", 1: "wrong"}],
    "initializer_range": [0.5],
    "intermediate_size": [40],
    "is_encoder_decoder": [True],
    "label2id": [{"right": 0, "wrong": 1}],
    "layer_types": [
        *(SLIDING, ["full_attention"] * 3, ["chunked_attention"] * 3),
        {"layer_types": SLIDING, **WINDOWS},
        {"layer_types": SLIDING, "sliding_window": 6},
        {"layer_types": SLIDING, **WINDOWS, "use_sliding_window": False},
    ],
    "max_position_embeddings": [40],
    "max_window_layers": [{**WINDOWS, "max_window_layers": n} for n in (0, 2)],
    "mlp_bias": [True],
    "mlp_only_layers": [[0], [0, 2]],
    "moe_intermediate_size": [40],
    "no_rope_layer_interval": [1, 3],
    "no_rope_layers": [[0, 1, 1], [0, 0, 0]],
    "norm_topk_prob": [True, False],
    "num_attention_heads": [2, {"num_attention_heads": 8, "num_key_value_heads": 2}],
    "num_experts": [3, 8],
    "num_experts_per_tok": [1, 3],
    "num_hidden_layers": [1],
    "num_key_value_heads": [1, 4, None],
    "original_max_position_embeddings": [
        20,
        {"original_max_position_embeddings": 40, "rope_parameters": {**THETA, **FACTORS, "rope_type": "longrope"}},
        {"original_max_position_embeddings": 40, "rope_parameters": ROPES[5]},
    ],
    "output_hidden_states": [True],
    "output_router_logits": [True],
    "pad_token_id": [0, 5],
    "pretraining_tp": [2],
    "problem_type": ["regression"],
    "query_pre_attn_scalar": [3],
    "resid_pdrop": [0.5],
    "return_dict": [False],
    "rms_norm_eps": [0.1],
    "rope_parameters": [*ROPES, *NESTED],
    "router_aux_loss_coef": [0.5],
    "sliding_window": [5, 1, None, {**WINDOWS}],
    "tie_word_embeddings": [True],
    "transformers_version": ["4.0.0"],
    "use_bidirectional_attention": [True],
    "use_cache": [False],
    "use_sliding_window": [{**WINDOWS}, {**WINDOWS, "use_sliding_window": False}, True],
    "vocab_size": [67],
}
# Keys that no class declares, but that config.json files of these or other families have.
OTHERS: dict[str, list[Any]] = {
    "attention_multiplier": [0.1],
    "embedding_multiplier": [3.0],
    "is_causal": [False],
    "is_decoder": [False, True],
    "layer_norm_eps": [0.1],
    "logit_scale": [0.1],
    "logits_scaling": [8.0],
    "num_local_experts": [4],
    "output_attentions": [True],
    "partial_rotary_factor": [0.5],
    "qkv_bias": [True],
    "quantization_config": [{"quant_method": "fp8", "activation_scheme": "dynamic"}],
    "residual_multiplier": [0.2],
    "rope_local_base_freq": [100.0],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}, {"type": "dynamic", "factor": 3.0}],
    "rope_theta": [100.0],
    "sliding_window_pattern": [3],
    "use_qk_norm": [True],
}


class Cell(NamedTuple):
    """What one value gave: `trainer` and `engine` are "equal", "rejected", or what is wrong with them; both are empty
    where transformers itself raises."""

    family: str
    field: str
    value: str
    trainer: str
    engine: str


def cases(family: str, fields: Sequence[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, settings that it is tried with) of every field that some family has, and of others."""
    table = VALUES | OTHERS
    for name in fields or table:
        for value in deepcopy(table[name]):  # configurations change mappings in place
            # A mapping that names the field has others alongside it.
            settings = value if isinstance(value, dict) and name in value else {name: value}
            yield name, settings


def config_of(family: str, **settings: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**COMMON | OF_FAMILY.get(family, {}) | settings)


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def expected(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """The log-probability of each token but the first."""
    ids = torch.tensor([list(tokens)])
    logits = model(ids, return_dict=True).logits
    return logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def trained(folder: Path, oracle: PreTrainedModel) -> str:
    """The policy in training, its sequences in one pack, scored twice."""
    try:
        policy = Policy.from_pretrained(folder).train()
        rows = [Episode.given(tokens, [False] + [True] * (len(tokens) - 1)) for tokens in SEQUENCES]
        batch = pack(rows)
        with torch.no_grad():
            scores = [policy(batch).logprobs for _ in range(2)]
    except Exception as error:
        return rejection(error)
    wanted = torch.cat([expected(oracle, tokens) for tokens in SEQUENCES])
    return verdict(max(float((score - wanted).abs().max()) for score in scores))


def generated(folder: Path, oracle: PreTrainedModel) -> str:
    try:
        with EmbeddedEngine(folder, slots=8) as engine:
            futures = [engine.submit(tokens, Sampling(max_tokens=LENGTH - 30, seed=1)) for tokens in SEQUENCES]
            completions = [future.result(60)[0] for future in futures]
    except Exception as error:
        return rejection(error)
    differences = []
    for completion in completions:
        wanted = expected(oracle, [*completion.prompt_ids, *completion.token_ids])[len(completion.prompt_ids) - 1 :]
        differences.append(float((wanted - torch.tensor(completion.logprobs)).abs().max()))
    return verdict(max(differences))


def rejection(error: Exception) -> str:
    """A ValueError of one line is one; another error is a fault."""
    if isinstance(error, ValueError) and "\n" not in str(error):
        return "rejected"
    return f"raises {type(error).__name__}: {error}"


def verdict(difference: float) -> str:
    """Of the largest difference between log-probabilities."""
    return "equal" if difference <= TOLERANCE else f"different by {difference:.2g}"


def cell(family: str, field: str, settings: dict[str, Any]) -> Cell:
    value = ", ".join(f"{name}={setting!r}" for name, setting in settings.items())
    with tempfile.TemporaryDirectory() as folder:
        try:
            model_of(config_of(family, **settings)).save_pretrained(folder)
            oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            expected(oracle.eval(), SEQUENCES[1])
        except Exception:  # of any kind: transformers does not have this value
            return Cell(family, field, value, "", "")
        return Cell(family, field, value, trained(Path(folder), oracle), generated(Path(folder), oracle))


def sweep(families: Sequence[str], fields: Sequence[str] | None = None) -> Iterator[Cell]:
    """All values of the fields, by default of all fields."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for family in families:
        for field, settings in cases(family, fields):
            yield cell(family, field, settings)
