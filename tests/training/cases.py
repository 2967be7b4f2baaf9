"""Tiny models of every family and small batches, the same in every process that asks for them."""

import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from forge.algorithms.base import Aggregation
from forge.data.packing import pack
from forge.models.tokenizer import character_tokenizer
from forge.training.distributed import Ranks, join_ranks
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Batch, Episode

TOKENIZER = character_tokenizer(string.ascii_lowercase)
VOCAB = len(TOKENIZER)
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.5, 2.0],
    "long_factor": [3.0, 4.0],
    "partial_rotary_factor": 0.5,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    "olmo2": (Olmo2Config, {}),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "phi3": (Phi3Config, {"pad_token_id": 0, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 20}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 8, "norm_topk_prob": True, **EXPERTS}),
    "olmoe": (OlmoeConfig, {"num_experts": 5, "num_experts_per_tok": 3, "pad_token_id": None}),
    "gemma3": (
        Gemma3TextConfig,
        {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 4, "sliding_window_pattern": 2},
    ),
}


def tiny_model(
    family: str = "qwen3", *, tied: bool = True, kind: Any = AutoModelForCausalLM, **settings: Any
) -> PreTrainedModel:
    """Random weights that make distributions far from uniform; two query heads share a key head."""
    of_family, extra = FAMILIES[family]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "eos_token_id": TOKENIZER.eos_token_id,
        "bos_token_id": None,
    }
    config = of_family(**common | extra | settings)
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model


def write_model(folder: Path, family: str = "qwen3", *, tied: bool = True, **settings: Any) -> Path:
    """A tiny model and its tokenizer in Hugging Face format."""
    tiny_model(family, tied=tied, **settings).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def write_classifier(folder: Path, **settings: Any) -> Path:
    """A tiny sequence classifier, of one class unless `num_labels` says otherwise."""
    settings = {"num_labels": 1, **settings}
    tiny_model(kind=AutoModelForSequenceClassification, **settings).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def episodes(lengths: list[tuple[int, int]], seed: int = 0) -> list[Episode]:
    """Random episodes of (context, response) lengths with behaviour log-probabilities and advantages."""
    random = np.random.default_rng(seed)
    return [
        Episode(
            prompt_ids=random.integers(3, VOCAB, context).tolist(),
            response_ids=random.integers(3, VOCAB, response).tolist(),
            logprobs=random.uniform(-5, -2, response).tolist(),
            versions=[0] * response,
            advantage=float(random.normal()),
        )
        for context, response in lengths
    ]


def example(
    seed: int = 0,
    lengths: list[tuple[int, int]] | None = None,
    *,
    aggregation: Aggregation = "token_mean",
    reference: bool = True,
) -> Batch:
    """A batch of random episodes, with the log-probabilities of an imagined reference."""
    chosen = [(3, 5), (1, 9), (6, 2), (2, 1), (4, 4)] if lengths is None else lengths
    batch = pack(episodes(chosen, seed), aggregation=aggregation)
    if reference:
        noise = np.random.default_rng(seed + 1).uniform(-5, -2, len(batch.tokens)).astype(np.float32)
        batch.ref_logprobs = noise * batch.mask
    return batch


def regression(values: torch.Tensor, returns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a value or reward head learns in the tests: a squared error."""
    return (weights * (values - returns) ** 2).sum()


def targets(seed: int = 0, lengths: list[tuple[int, int]] | None = None, *, last: bool = False) -> Batch:
    """A batch with something to predict; `last` trains only the last token of each sequence."""
    batch = example(seed, lengths, reference=False)
    if last:
        batch.mask = np.zeros_like(batch.mask)
        batch.mask[np.cumsum(batch.lengths) - 1] = True
        batch.weights = batch.mask / np.float32(len(batch))
    batch.returns = np.random.default_rng(seed).normal(size=len(batch.tokens)).astype(np.float32)
    return batch


def make_trainer(model: Path, ranks: Ranks | None = None, **settings: Any) -> PolicyTrainer:
    """A trainer; settings of the optimiser and of the trainer go by their names."""
    known = OptimizerSettings.model_fields
    optimizer = {"learning_rate": 1e-3} | {name: value for name, value in settings.items() if name in known}
    others = {name: value for name, value in settings.items() if name not in known}
    return PolicyTrainer(model, ranks or join_ranks(), OptimizerSettings(**optimizer), **others)


def weights_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export_weights()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Over tensors of the same names."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
