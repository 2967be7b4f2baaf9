"""Floating-point operations of a model, and the peak rate of its device.

    forward = 2 * (parameters that multiply a token) * tokens + 4 * layers * heads * head_dim * (tokens attended to)
    training step = 3 * forward * epochs,   MFU = operations / (seconds * devices * peak)

Embeddings are looked up and count nothing, the head counts for the tokens it is computed for, of a mixture of experts
those that a token takes. Activations that are computed again (checkpointing) do not count. A prompt that sequences of
a batch share counts for each of them in training, once in generation.
"""

from typing import TYPE_CHECKING

from ..config.plugin import resolve
from .architecture import is_native, sparse_layers
from .weight_layouts import engine_layout, head_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Dense bfloat16, in TFLOP/s, by a part of the name (data sheets of NVIDIA and AMD).
PEAKS = {
    **{"B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0},
    **{"L4": 121.0, "A10": 125.0, "MI300X": 1307.0, "RTX 4090": 165.0},
}


def forward_flops(config: "PreTrainedConfig", tokens: float, attended: float, predicted: float) -> float:
    """Return the number of floating-point operations of a forward pass.

    Args:
        config: the model's transformers config.
        tokens: number of computed tokens.
        attended: the sum over tokens of the number of tokens that each attends to.
        predicted: number of tokens that the head is computed for.
    """
    if not is_native(config):
        return resolve("forge_families.sizes:forward_flops", "model")(  # type: ignore[no-any-return]
            config, tokens, attended, predicted
        )

    # The weights of matrices that a token is multiplied with: of the experts only the share that it is routed to.
    expert_share = config.num_experts_per_tok / config.num_experts if sparse_layers(config) else 1.0
    active_weights = sum(
        part.rows * part.inner[0] * (expert_share if ".experts." in name else 1.0)
        for name, parts in engine_layout(config).items()
        for part in parts
        if part.inner and not part.repeated and name not in ("embed", "head.weight")
    )

    # A multiplication and an addition for each weight; for each attended token, both with its key and its value.
    attention = config.num_hidden_layers * config.num_attention_heads * head_size(config) * attended
    return 2.0 * (active_weights * tokens + config.hidden_size * config.vocab_size * predicted) + 4.0 * attention


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
