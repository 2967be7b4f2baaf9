"""Small models of families that this library computes by transformers' modules, and what transformers says of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from forge.types import Batch
from forge_families.probe import build_small_model, shrink_config
from tests.training.cases import TOKENIZER, VOCAB

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}  # four layers carry rounding on to 1e-3 of gradients
# By model type: values of its config, and the attention that the probe finds.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": ({}, "forge_packed"),  # latent attention, whose keys and values differ in size
    "glm4_moe": ({}, "forge_packed"),  # a router with a bias that is a buffer
    "granite": ({"logits_scaling": 4.0, "attention_multiplier": 0.1}, "forge_packed"),
    "cohere2": ({"sliding_window": 16}, "forge_packed"),  # its head is scaled by the class
    "gemma4_text": ({}, "forge_packed"),  # heads of several sizes, embeddings of each layer
    "phi": ({}, "forge_packed"),  # a head with a bias: logits come from the model
    "gemma2": ({}, "eager"),  # caps of logits and of attention
    "gpt_oss": ({}, "eager"),  # attention sinks
    "qwen3_5_text": ({"num_hidden_layers": 2, **HYBRID}, "sdpa"),  # gated delta net
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 8, "num_hidden_layers": 16}, "sdpa"),  # short convolutions
}


def small_config(kind: str, **values: Any) -> PreTrainedConfig:
    """The config of a family with few narrow layers, and the vocabulary of the tests' tokenizer."""
    config = shrink_config(AutoConfig.for_model(kind, **KINDS.get(kind, ({}, ""))[0] | values))
    config.vocab_size, config.bos_token_id = values.get("vocab_size", VOCAB), None
    config.eos_token_id = values.get("eos_token_id", TOKENIZER.eos_token_id)
    return config


def small_model(kind: str, **values: Any) -> PreTrainedModel:
    """A model of the config of these values, with random weights."""
    return build_small_model(small_config(kind, **values))


def write_family(folder: Path, kind: str) -> Path:
    """A small model and the tests' tokenizer in Hugging Face format."""
    small_model(kind).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def draw_config(seed: int) -> tuple[str, dict[str, Any]]:
    """A family and values that change what it computes."""
    drawn = random.Random(seed)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": drawn.choice([0.5, 1.0])}
    kinds: dict[str, dict[str, Any]] = {
        "gemma2": {"attn_logit_softcapping": drawn.choice([None, 2.0]), "final_logit_softcapping": 3.0},
        "granite": {"logits_scaling": drawn.uniform(1, 8), "residual_multiplier": drawn.uniform(0.2, 1)},
        "glm4": {"rope_parameters": rope, "attention_bias": drawn.random() < 0.5},
        "starcoder2": {"sliding_window": drawn.choice([None, 9]), "use_bias": drawn.random() < 0.5},
        "stablelm": {"rope_parameters": rope, "use_qkv_bias": drawn.random() < 0.5},
        "olmo3": {"sliding_window": 9, "attention_bias": drawn.random() < 0.5},
        "cohere2": {"logit_scale": drawn.uniform(0.1, 1), "sliding_window": 9},
        "gpt_oss": {"sliding_window": 9},
    }
    kind = drawn.choice(sorted(kinds))
    return kind, {"tie_word_embeddings": drawn.random() < 0.5, **kinds[kind]}


def batch_of(lengths: tuple[int, ...] = (5, 1, 12, 50, 50, 2, 33)) -> Batch:
    """Random tokens, of which all but the first of each sequence are trained; two sequences share a prefix."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(3, VOCAB, sum(lengths))
    starts = np.cumsum([0, *lengths[:-1]])
    if len(lengths) > 4:
        tokens[starts[4] : starts[4] + 30] = tokens[starts[3] : starts[3] + 30]
    mask = np.ones(len(tokens), dtype=np.bool_)
    mask[starts] = False
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return Batch(tokens, np.array(lengths), mask, zeros, zeros, zeros, zeros)


def score_plainly(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of trained tokens by transformers' forward pass of each sequence."""
    logprobs, entropies = [], []
    for tokens in torch.from_numpy(batch.tokens).split(batch.lengths.tolist()):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / temperature
        logp = logits.log_softmax(-1)
        logprobs.append(logp.gather(1, tokens[1:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)
