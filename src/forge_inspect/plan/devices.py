"""Devices that a plan is for, and the shapes of models: from a folder, or of public models without a download."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.models.hub import is_hub_reachable, split_revision

GB = 1e9
GIB = 2**30
# Bytes of a process on a GPU that torch's allocator does not count: driver, kernels and buffers of collectives.
CONTEXT = 1.5 * GB
# Bytes of memory that torch reports.
DEVICES = {
    "A100-40": 39.4 * GIB,
    "A100": 79.2 * GIB,
    "H100": 79.2 * GIB,
    "H200": 139.8 * GIB,
    "B200": 178.4 * GIB,
    "L4": 22.0 * GIB,
    "L40S": 44.5 * GIB,
    "A10": 22.0 * GIB,
    "RTX4090": 23.5 * GIB,
}


@dataclass(frozen=True)
class Machines:
    """`count` devices of one kind, each with `memory` bytes; for CPUs, `count` is 1 and `type` is "cpu"."""

    device: str
    memory: float
    count: int
    type: str = "cuda"


def parse_machines(text: str, cpu: Machines) -> Machines:
    """Return the devices that a text names: "8xH100", "H100" or "cpu".

    Args:
        cpu: returned for "cpu".

    Raises:
        ValueError: an unknown device; the message lists the known ones.
    """
    if text.lower() == "cpu":
        return cpu
    match = re.fullmatch(r"(?:([1-9]\d*)\s*[xX])?\s*([\w-]+)", text.strip())
    device = match and next((name for name in DEVICES if name.lower() == match[2].lower()), None)
    if not match or not device:
        raise ValueError(
            f"--gpus {text!r}: must be a number and a device, such as 8xH100; known are {', '.join(DEVICES)}, cpu"
        )
    return Machines(device, DEVICES[device], int(match[1] or 1))


QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
LLAMA3 = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768}
QWEN2_LARGE = {**QWEN2, "num_key_value_heads": 8, "vocab_size": 152064}
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None}
MISTRAL |= {"vocab_size": 32768, "max_position_embeddings": 32768}
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}


def _make_shape(
    family: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False, **others: Any
) -> dict[str, Any]:
    return {
        "max_position_embeddings": 40960,
        **family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **others,
    }


# From the config.json files of their authors.
PUBLIC = {
    "Qwen/Qwen3-0.6B": _make_shape(QWEN3, 1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _make_shape(QWEN3, 2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _make_shape(QWEN3, 2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-4B-Instruct-2507": _make_shape(QWEN3, 2560, 9728, 36, 32, tied=True, max_position_embeddings=262144),
    "Qwen/Qwen3-8B": _make_shape(QWEN3, 4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": _make_shape(QWEN3, 5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": _make_shape(QWEN3, 5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": _make_shape(QWEN3_MOE, 2048, 6144, 48, 32, num_key_value_heads=4, moe_intermediate_size=768),
    "Qwen/Qwen3-235B-A22B": _make_shape(
        QWEN3_MOE, 4096, 12288, 94, 64, num_key_value_heads=4, moe_intermediate_size=1536
    ),
    "Qwen/Qwen2.5-0.5B": _make_shape(QWEN2, 896, 4864, 24, 14, tied=True),
    "Qwen/Qwen2.5-1.5B": _make_shape(QWEN2, 1536, 8960, 28, 12, tied=True),
    "Qwen/Qwen2.5-3B": _make_shape(QWEN2, 2048, 11008, 36, 16, tied=True),
    "Qwen/Qwen2.5-7B": _make_shape(QWEN2_LARGE, 3584, 18944, 28, 28, num_key_value_heads=4),
    "Qwen/Qwen2.5-14B": _make_shape(QWEN2_LARGE, 5120, 13824, 48, 40),
    "Qwen/Qwen2.5-32B": _make_shape(QWEN2_LARGE, 5120, 27648, 64, 40),
    "Qwen/Qwen2.5-72B": _make_shape(QWEN2_LARGE, 8192, 29568, 80, 64),
    "mistralai/Mistral-7B-v0.3": _make_shape(MISTRAL, 4096, 14336, 32, 32),
    "mistralai/Mistral-Nemo-Base-2407": _make_shape(
        MISTRAL, 5120, 14336, 40, 32, vocab_size=131072, max_position_embeddings=131072
    ),
    "mistralai/Mistral-Small-24B-Base-2501": _make_shape(MISTRAL, 5120, 32768, 40, 32, vocab_size=131072),
    "meta-llama/Llama-3.1-8B-Instruct": _make_shape(LLAMA3, 4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-70B-Instruct": _make_shape(LLAMA3, 8192, 28672, 80, 64),
}
# Models with the same shape as another.
PUBLIC |= {
    f"{name}-Base": PUBLIC[name] for name in list(PUBLIC) if name.startswith("Qwen/Qwen3-") and "-2507" not in name
}
PUBLIC |= {f"{name}-Instruct": PUBLIC[name] for name in list(PUBLIC) if name.startswith("Qwen/Qwen2.5-")}
PUBLIC |= {
    name.replace("2.5-", "2.5-Coder-"): PUBLIC[name] for name in list(PUBLIC) if re.search(r"2\.5-(?!72B)", name)
}
PUBLIC |= {
    "mistralai/Mistral-7B-Instruct-v0.3": PUBLIC["mistralai/Mistral-7B-v0.3"],
    "mistralai/Mistral-Nemo-Instruct-2407": PUBLIC["mistralai/Mistral-Nemo-Base-2407"],
    "mistralai/Mistral-Small-24B-Instruct-2501": PUBLIC["mistralai/Mistral-Small-24B-Base-2501"],
    "meta-llama/Llama-3.1-8B": PUBLIC["meta-llama/Llama-3.1-8B-Instruct"],
    **{
        f"{name}-Instruct-2507": {**PUBLIC[name], "max_position_embeddings": 262144}
        for name in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B")
    },
}


def shape_folder(model: str, scratch: Path) -> Path:
    """Return a folder with the config.json of a model: itself a folder, a public model known here, or one of the hub.

    Args:
        model: folder or hub id.
        scratch: a folder to which the config.json of a known model is written.

    Raises:
        ValueError: the model is none of these.
    """
    if Path(model).is_dir():
        return Path(model)
    name, revision = split_revision(model)

    # Before the hub, which takes half a minute where there is no network.
    if name in PUBLIC:
        fields = {**PUBLIC[name], "architectures": [ARCHITECTURES[PUBLIC[name]["model_type"]]]}
        folder = scratch / name.replace("/", "--")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields, indent=1))
        return folder

    from huggingface_hub import hf_hub_download

    try:
        reachable = is_hub_reachable()
        return Path(hf_hub_download(name, "config.json", revision=revision, local_files_only=not reachable)).parent
    except (OSError, ValueError) as error:
        public_names = ", ".join(name for name in PUBLIC if not re.search("-Base|-Coder|2.5-.*Instruct", name))
        raise ValueError(
            f"{model} is not a directory, and its config.json cannot be read from the hub ({type(error).__name__}): "
            f"give a directory with config.json; known without it are {public_names}"
        ) from None
