"""Floating-point operations of a model, and the peak rate of its device.

    forward = 2 * (parameters that multiply a token) * tokens + 4 * layers * heads * head_dim * (tokens attended to)
    training step = 3 * forward * epochs,   MFU = operations / (seconds * devices * peak)

Embeddings are looked up and count nothing, the head counts for the tokens it is computed for, of a mixture of experts
those that a token takes. Activations that are computed again (checkpointing) do not count. A prompt that sequences of
a batch share counts for each of them in training, once in generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config.plugin import resolve
from .architecture import FAMILIES, sparse_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Dense bfloat16, in TFLOP/s, by a part of the name (data sheets of NVIDIA and AMD).
PEAKS = {
    **{"B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0},
    **{"L4": 121.0, "A10": 125.0, "MI300X": 1307.0, "RTX 4090": 165.0},
}


def forward_flops(config: PreTrainedConfig, tokens: float, attended: float, predicted: float) -> float:
    """Return the number of floating-point operations of a forward pass.

    Args:
        config: the model's transformers config.
        tokens: number of computed tokens.
        attended: the sum over tokens of the number of tokens that each attends to.
        predicted: number of tokens that the head is computed for.
    """
    if config.model_type not in FAMILIES:
        # fmt: skip
        return resolve("forge_families.sizes:forward_flops", "model")(config, tokens, attended, predicted)  # type: ignore[no-any-return]
    # The parameters of attention's four matrices, the feed-forward's three, and the experts that a token takes.
    size = config.hidden_size
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    attention = size * head * (heads + 2 * kv) + heads * head * size
    sparse = len(sparse_layers(config))
    dense = (config.num_hidden_layers - sparse) * 3 * size * config.intermediate_size

    experts = 0
    if sparse:
        width = config.moe_intermediate_size if config.model_type == "qwen3_moe" else config.intermediate_size
        experts = sparse * (config.num_experts_per_tok * 3 * size * width + size * config.num_experts)
    layers = config.num_hidden_layers * attention + dense + experts
    matrices = 2.0 * (layers * tokens + size * config.vocab_size * predicted)

    return matrices + 4.0 * config.num_hidden_layers * heads * head * attended


def count_causal(length: float, context: float = 0.0) -> float:
    """Return the sum, over `length` tokens that follow `context` others, of the tokens that each attends to.

    >>> count_causal(4, context=10)
    50.0
    """
    return length * context + length * (length + 1) / 2


def peak_tflops(gpu: str | None) -> float | None:
    """Return the peak rate of a GPU of this name for dense bfloat16, in TFLOP/s; None if it is not known.

    >>> peak_tflops("NVIDIA H100 80GB HBM3")
    989.0
    """
    return next((peak for name, peak in PEAKS.items() if name in (gpu or "")), None)
