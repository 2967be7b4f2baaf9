"""Tiny random checkpoints of every family, and the plain transformers forward pass that engines are held to."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
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

from forge.engines import EmbeddedEngine
from forge.types import Completion, Sampling

MODES = ("continue", "finish", "recompute")  # of weight updates
VOCAB = 61
EOS = 3
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
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
    "llama-biased": (LlamaConfig, {"attention_bias": True}),
    "llama-scaled": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-windows": (Qwen3Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "mistral-full": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "olmo2": (Olmo2Config, {}),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "phi3": (Phi3Config, {"pad_token_id": 0, "sliding_window": 7}),
    "phi3-long": (
        Phi3Config,
        {"pad_token_id": 0, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 72},
    ),
    "qwen3-moe": (Qwen3MoeConfig, {"head_dim": 16, "norm_topk_prob": True} | EXPERTS),
    "qwen3-moe-mixed": (Qwen3MoeConfig, {"head_dim": 16, "mlp_only_layers": [0]} | EXPERTS),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None}),
    "gemma3": (
        Gemma3TextConfig,
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6, "sliding_window_pattern": 2}
        | {"rope_parameters": {"sliding_attention": LOCAL_ROPE, "full_attention": LOCAL_ROPE | {"rope_theta": 1e6}}},
    ),
}

Make = Callable[..., tuple[Path, PreTrainedModel]]


def random_model(
    family: str = "qwen3",
    tied: bool = False,
    seed: int = 0,
    eos: int | None = None,
    spread: float = 0.3,
    **sizes: int,
) -> PreTrainedModel:
    """A model whose distributions are far from uniform and whose norms and biases are far from their defaults."""
    kind, extra = FAMILIES[family]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
    }
    own = {"tie_word_embeddings": tied, "eos_token_id": eos, "bos_token_id": None}
    config = kind(**settings | own | extra | sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, spread) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(*args: object, **kwargs: object) -> tuple[Path, PreTrainedModel]:
        model = random_model(*args, **kwargs)  # type: ignore[arg-type]
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return make


@torch.no_grad()
def logits_of(model: PreTrainedModel, completion: Completion) -> torch.Tensor:
    """Next-token logits before each token of a completion, (tokens, V), by one forward pass over the sequence."""
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    return model(ids).logits[0, len(completion.prompt_ids) - 1 : -1]


def error_of(model: PreTrainedModel, completion: Completion, temperature: float = 1.0) -> float:
    """The largest difference between a completion's log-probabilities and the forward pass."""
    expected = (logits_of(model, completion) / temperature).log_softmax(-1)
    expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


def check_shape(completions: list[Completion], sampling: Sampling, stops: set[int]) -> None:
    """What holds for every request: n completions, lengths, and a stop token last and nowhere else."""
    assert len(completions) == sampling.n
    for completion in completions:
        ids = completion.token_ids
        assert 1 <= len(ids) <= sampling.max_tokens
        assert len(ids) == len(completion.logprobs) == len(completion.versions)
        assert not stops & set(ids[:-1])
        assert completion.finish == ("stop" if ids[-1] in stops else "length")
        assert completion.finish == "stop" or len(ids) == sampling.max_tokens


def oracle(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The sampled distribution, token by token in plain Python."""
    highest = max(logits)
    weights = {i: math.exp((x - highest) / temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: -weights[i])[: top_k or len(weights)]
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}


@torch.no_grad()
def check_by_hand(models: dict[int, PreTrainedModel], completion: Completion, keep: bool) -> None:
    """Log-probabilities at temperature 1, every token by the weights of its version.

    keep: keys and values stay those of the version under which a token was decoded; otherwise all are of the version
    that draws. Prompts but for their last token belong to the first token's version.
    """
    ids, count = [*completion.prompt_ids, *completion.token_ids], len(completion.prompt_ids)
    assert completion.versions == sorted(completion.versions)
    cache = DynamicCache()
    done = 0
    for i, version in enumerate(completion.versions):
        model = models[version]
        if not keep:
            cache, done = DynamicCache(), 0
        piece = torch.tensor([ids[done : count + i]])
        positions = torch.arange(done, count + i)[None]
        logits = model(piece, past_key_values=cache, position_ids=positions, use_cache=True).logits[0, -1]
        done = count + i
        expected = float(logits.log_softmax(-1)[completion.token_ids[i]])
        assert completion.logprobs[i] == pytest.approx(expected, abs=2e-4)


def drive(engine: EmbeddedEngine, at: dict[int, Callable[[], Any]]) -> None:
    """Call what stands at a number of steps after that decode step, in the engine's own thread."""
    batch, step = engine._batch, engine._batch.step

    def stepped() -> Any:
        result = step()
        if batch.steps in at:
            at.pop(batch.steps)()
        return result

    batch.step = stepped  # type: ignore[method-assign]


@pytest.fixture
def models(make: Make) -> tuple[Path, dict[int, PreTrainedModel]]:
    folder, first = make("qwen3", eos=EOS)
    return folder, {0: first} | {v: random_model("qwen3", seed=v) for v in (1, 2, 3)}


def updater(engine: EmbeddedEngine, models: dict[int, PreTrainedModel], futures: list[Any], version: int) -> Any:
    return lambda: futures.append(
        engine.update_weights(models[version].state_dict().items(), version, f"digest {version}")
    )
