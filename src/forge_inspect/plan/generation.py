"""The memory of an engine: weights, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from forge.engines.cache import BLOCK, WIDTH, rounded, token_bytes
from forge.engines.engine import MARGIN
from forge.engines.interface import check_length
from forge.engines.settings import EngineSettings

from .devices import CONTEXT, Device

UTILISATION = 0.9  # of a GPU's memory, which vLLM takes by default


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one process of an engine.

    weights: one version. update: the next version, which is filled while this one decodes. cache: keys and values.
    others: logits, the cache of prefixes, what torch does not count. sequences: of full length that run at once.
    token_bytes: keys and values of a token. most: such sequences that all of the memory has room for; on a CPU 0.
    """

    weights: int
    update: int
    cache: int
    others: int
    sequences: int
    token_bytes: int
    most: int = 0


def engine_memory(
    config: PreTrainedConfig, elements: int, settings: EngineSettings, procs: int, device: Device
) -> EngineMemory:
    """The memory of one process of an engine.

    Args:
        elements: parameters of the model.
        procs: processes that share it, by vLLM's tensor parallelism.
    """
    itemsize = 2 if settings.dtype == "bfloat16" else 4
    length = rounded(check_length(config, settings.max_seq_len), BLOCK)
    per_token = token_bytes(config, getattr(torch, settings.dtype), settings.router_replay) // procs
    weights = elements * itemsize // procs
    if settings.engine == "vllm":
        share = float(settings.vllm.get("gpu_memory_utilization", UTILISATION))
        cache = max(0, int(share * device.memory) - weights - MARGIN)
        most = cache // (length * per_token)
        return EngineMemory(weights, 0, cache, MARGIN, min(settings.slots, most), per_token, most)
    logits = 4 * settings.slots * config.vocab_size * 4
    if settings.captures(config, device.type):
        logits *= 2
    others = logits + int(settings.prefix_cache_mb * 1e6)
    # One more row, in which prompts are computed.
    rows = rounded(settings.slots, WIDTH) + 1
    wanted = rows * length * per_token
    most = 0
    if settings.cache_gb is not None:
        cache = min(wanted, round(settings.cache_gb * 1e9))
    elif device.type == "cpu":
        cache = wanted
    else:
        others += MARGIN
        room = max(0, int(device.memory - CONTEXT) - 2 * weights - others)
        cache = min(wanted, room)
        # More slots have more logits.
        most = (room + logits) // (length * per_token + logits // settings.slots) - 1
    sequences = max(0, min(settings.slots, cache // (length * per_token) - 1))
    return EngineMemory(weights, weights, cache, others, sequences, per_token, most - most % WIDTH)
