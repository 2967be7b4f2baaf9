"""Ask a model's class, with a config cut to a few narrow layers, how the trainer may compute it.

The small model has random weights large enough that windows, caps and attention sinks change its results. What it
computes for sequences in a pack, or in padded rows, is compared with what it computes for each of them.
"""

import copy
import json
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from forge.models.find import quiet_loading
from forge.models.tokenizer import has_images, model_class
from forge.system.files import cache_folder, write_atomic
from forge.training.attention import NAME
from forge.types import Batch

from .policy import FamilyPolicy, Traits

log = logging.getLogger(f"forge.{__name__}")

# Of log-probabilities, in nats: rounding made 3e-4 of Qwen3.5 on one CPU, a cap that is left out 6e-3 of Gemma 2.
TOLERANCE = 1e-3
LENGTHS = (7, 19, 50, 50)  # of the probe's sequences: shorter and longer than the small model's window
SHARED = 30  # tokens of a prefix, which packing computes once
LARGEST = 50_000_000  # parameters of a small model
# Sizes of the small model, by the names that configs give them.
SIZES = {
    name: size
    for size, names in (
        (0, "num_nextn_predict_layers bos_token_id"),
        (
            1,
            "n_group num_expert_group topk_group n_shared_experts num_dense_layers first_k_dense_replace n_groups "
            "num_kv_shared_layers mamba_n_groups eos_token_id",
        ),
        (
            2,
            "num_key_value_heads num_kv_heads num_global_key_value_heads num_experts_per_tok "
            "num_experts_per_token moe_k moe_topk top_k_experts linear_num_key_heads "
            "pad_token_id mamba_expand",
        ),
        (
            4,
            "num_attention_heads n_head num_heads n_heads decoder_attention_heads num_experts "
            "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads",
        ),
        (8, "mamba_n_heads mamba_num_heads n_mamba_heads qk_rope_head_dim rotary_dim patch_size"),
        (
            16,
            "sliding_window attention_window_size attention_chunk_size index_topk index_n_heads head_dim "
            "qk_nope_head_dim v_head_dim index_head_dim global_head_dim kv_lora_rank hidden_size_per_layer_input "
            "per_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim "
            "mamba_d_state ssm_state_size state_size",
        ),
        (24, "qk_head_dim"),
        (
            32,
            "moe_intermediate_size expert_ffn_hidden_size expert_intermediate_size "
            "shared_expert_intermediate_size moe_shared_expert_intermediate_size q_lora_rank projection_dim "
            "attention_head_dim "
            "image_size",
        ),
        (64, "hidden_size n_embd d_model embedding_size embedding_dim lru_width word_embed_proj_dim"),
        (
            96,
            "intermediate_size n_inner d_ff ffn_dim decoder_ffn_dim ffn_hidden_size intermediate_size_mlp "
            "shared_intermediate_size block_ff_dim dense_intermediate_size",
        ),
        (128, "vocab_size vocab_size_per_layer_input mamba_d_ssm"),
        (256, "max_position_embeddings n_positions n_ctx"),
    )
    for name in names.split()
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")


_ANSWERS: dict[str, Any] = {}  # by question
# Of the imported code, and of the packages next to transformers, whose folder changes when one is installed.
_VERSIONS = (
    *(transformers.__version__, torch.__version__, Path(transformers.__file__).parents[1].stat().st_mtime_ns),
    *(sorted(path.stat().st_mtime_ns for path in (Path(__file__).parents[1]).glob("forge*/**/*.py") if path.is_file())),
)


def check_config(config: PreTrainedConfig) -> None:
    """Check that transformers' modules of this config can be trained.

    Raises:
        ValueError: a value that is not supported; the message names it.
    """
    name = f"{config.name_or_path or 'the model'} ({config.model_type})"
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{name}: quantized weights (quantization_config) are not supported here: dequantize them with "
            "`resolve_model`"
        )
    try:
        find_traits(config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_packed(config: PreTrainedConfig, use: str) -> None:
    """Check that a model of this config has packed attention, which `use` asks for.

    Raises:
        ValueError: packed attention does not compute the model; the message says why.
    """
    if reason := find_traits(config).reason:
        raise ValueError(f"{config.model_type} models have no {use}: {reason}")


def check_names(config: PreTrainedConfig) -> None:
    """Check that a model's modules have the names and layouts of its files, by which vLLM reads updates of weights.

    Raises:
        ValueError: transformers converts them; the message names one.
    """
    model = build_small_model(config)
    parameters = dict(model.named_parameters())
    stored = revert_weight_conversion(model, parameters)
    changed = [name for name, tensor in parameters.items() if name not in stored or stored[name].shape != tensor.shape]
    if changed:
        raise ValueError(
            f"generator.engine vllm does not support {config.model_type}, because its weights such as {changed[0]} "
            "need a conversion on each update: choose embedded"
        )


def make_policy(model: PreTrainedModel) -> FamilyPolicy:
    """Return the policy of a model, with the traits that the probe finds."""
    return FamilyPolicy(model, find_traits(model.config))


def find_traits(config: PreTrainedConfig) -> Traits:
    """Return the traits with which the trainer computes models of a config.

    Raises:
        ValueError: transformers' padded rows differ from its own single sequences, or tokens see later ones.
    """
    return Traits(*recall_answer(config, _ask_model))


def recall_answer(config: PreTrainedConfig, ask: Callable[[PreTrainedConfig], tuple[Any, str]]) -> Any:
    """Return what `ask` answers about a config, and log the line that comes with it, once in each process.

    The cache directory keeps answers for this code, the installed packages and the kind of CPU: a model is asked once.
    """
    values = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "dtype")}
    question = repr((ask.__qualname__, _VERSIONS, torch.backends.cpu.get_cpu_capability(), values))

    if question not in _ANSWERS:
        try:
            answer = json.loads(_answer_file(question).read_text())
        except (OSError, ValueError, RuntimeError):  # RuntimeError: this user has no home
            answer = ask(config)
            with suppress(OSError, RuntimeError):  # a read-only directory: the next process asks again
                _answer_file(question).parent.mkdir(parents=True, exist_ok=True)
                write_atomic(_answer_file(question), json.dumps(answer))
        _ANSWERS[question], line = answer
        if line:
            log.info("model: %s", line)
    return _ANSWERS[question]


def _answer_file(question: str) -> Path:
    return cache_folder() / "probes" / xxhash.xxh3_128_hexdigest(question.encode())


def _ask_model(config: PreTrainedConfig) -> tuple[Traits, str]:
    if has_images(config):  # whose tokens may see one another in both directions
        return Traits("eager", None, "it reads images"), ""
    try:
        with quiet_loading():
            model = build_small_model(config)
            sequences = draw_sequences(model.config.get_text_config().vocab_size)
            expected = [score_alone(model, tokens) for tokens in sequences]
    except Exception as error:
        return (
            Traits("eager", None, f"its config cannot be cut to a small model ({first_words(error)})"),
            f"{config.model_type} is trained in padded rows, because no small test model can be made of its config "
            f"({error})",
        )

    changed = sequences[-1].clone()
    changed[-1] = (changed[-1] + 1) % 3
    if not torch.allclose(score_alone(model, changed)[:-1], expected[-1][:-1], atol=TOLERANCE):
        raise ValueError("bidirectional attention is not supported: check is_decoder in config.json")

    scale = _find_scale(model, sequences[-1])
    reason = ""
    for attention in (NAME, "sdpa", "eager"):
        if not (fault := _find_fault(model, Traits(attention, scale), sequences, expected)):
            return Traits(attention, scale, reason), ""
        reason = reason or f"packed attention does not compute it ({fault})"
    raise ValueError(f"the model computes padded rows differently from single sequences: {fault}")


def draw_sequences(vocabulary: int) -> list[Tensor]:
    """Return the token ids of the probe's sequences, of which the last two share a prefix.

    Args:
        vocabulary: the number of token ids; the first three, which may be special, are not drawn.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, vocabulary, (length,), generator=generator) for length in LENGTHS]
    sequences[-1][:SHARED] = sequences[-2][:SHARED]
    return sequences


def score_alone(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of a sequence's tokens but the first, by transformers' own forward pass."""
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def _find_scale(model: PreTrainedModel, tokens: Tensor) -> float | None:
    """Return the factor between the output embedding's products and the logits; None if no factor gives the logits."""
    head: Any = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        return None
    try:
        with torch.no_grad():
            states = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state
            logits = model(input_ids=tokens[None], use_cache=False).logits
            products = states @ head.weight.T
    except Exception:  # its base model has other outputs, or other sizes
        return None
    scale = float((logits / products).median())
    return scale if torch.allclose(products * scale, logits, rtol=1e-4, atol=1e-4) else None


def _find_fault(model: PreTrainedModel, traits: Traits, sequences: list[Tensor], expected: list[Tensor]) -> str:
    """Return how the policy's log-probabilities with these traits differ from those of separate sequences; "" if they
    agree."""
    lengths = np.array([len(tokens) for tokens in sequences])
    mask = np.ones(lengths.sum(), dtype=np.bool_)
    mask[np.cumsum(lengths) - lengths] = False
    zeros = np.zeros(len(mask), dtype=np.float32)
    batch = Batch(torch.cat(sequences).numpy(), lengths, mask, zeros, zeros, zeros, zeros)
    try:
        with torch.no_grad():
            scored = FamilyPolicy(copy.deepcopy(model), traits).train()(batch).logprobs
    except Exception as error:
        return first_words(error)
    difference = float((scored - torch.cat(expected)).abs().max())
    return "" if difference <= TOLERANCE else f"log-probabilities differ by {difference:.2g}"


def first_words(error: Exception | None) -> str:
    """Return the type and the first 160 characters of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def build_small_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return transformers' model of this config cut by `shrink_config`, with random weights, in float32.

    Raises:
        ValueError: the config cannot be cut.
    """
    small = shrink_config(config)
    torch.manual_seed(seed)
    with torch.device("meta"):
        size = model_class(small).from_config(small, trust_remote_code=False).num_parameters()
    if size > LARGEST:
        raise ValueError(f"the smallest model of this config still has {size:,} parameters")
    model = model_class(small).from_config(
        small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model.eval()


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config, and of those within it, with a few narrow layers, among them one of each kind.

    Raises:
        ValueError: the config's class rejects each of the smaller copies.
    """
    values = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "dtype")}
    layers = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), 0)
    kept = choose_layers(values, layers)
    sizes = {**SIZES, **dict.fromkeys(LAYERS, len(kept))}
    if values.get("num_key_value_heads") in (None, values.get("num_attention_heads")):
        sizes["num_key_value_heads"] = 4
    if values.get("qk_rope_head_dim") is not None:  # the head size is either the rotated part's or both parts'
        sizes["head_dim"] = 8 if values.get("head_dim") == values["qk_rope_head_dim"] else 24
    if values.get("attention_hidden_size"):
        sizes["attention_hidden_size"] = 64 * values["attention_hidden_size"] // values["hidden_size"]
    if isinstance(values.get("mamba_d_head"), int) and values.get("mamba_d_ssm"):
        sizes["mamba_d_ssm"] = 8 * min(values["mamba_d_head"], 16)
    if "expand" in values:  # heads of a state-space model, whose sizes' product is the expanded width
        sizes["num_heads"] = 8

    for name, value in values.items():
        limit = sizes.get(name, math.inf)
        if name in config.sub_configs and value is not None:
            values[name] = shrink_config(getattr(config, name))
        elif isinstance(value, list) and len(value) == layers and layers:
            values[name] = [min(value[i], limit) if type(value[i]) is int else value[i] for i in kept]
        elif type(value) is int:
            values[name] = min(value, limit)
    return _construct(type(config), values)


def _construct(kind: type, values: dict[str, Any]) -> PreTrainedConfig:
    """Return a config of this class; keys that it names as the fault of an error are omitted, one after another."""
    rejected: Exception | None = None
    for _ in range(8):
        try:
            return kind(**values)
        except Exception as error:
            rejected = error
            named = [name for name in values if f"'{name}'" in str(error) or f"`{name}`" in str(error)]
            if not named:
                break
            values = {name: value for name, value in values.items() if name not in named}
    raise ValueError(first_words(rejected))


def choose_layers(values: dict[str, Any], layers: int) -> list[int]:
    """Return the numbers of at least four layers, the first and the last of each kind among them, in order.

    >>> choose_layers({"layer_types": ["a", "a", "a", "a", "a", "b"]}, 6)
    [0, 1, 4, 5]
    """
    per_layer = [value for value in values.values() if isinstance(value, list) and len(value) == layers]
    kinds = list(zip(*([str(item) for item in value] for value in per_layer), strict=True)) or [()] * layers
    kept = {kinds.index(kind) for kind in kinds} | {layers - 1 - kinds[::-1].index(kind) for kind in kinds}
    others = [i for i in range(layers) if i not in kept]
    return sorted([*kept, *others[: max(0, 4 - len(kept))]])
