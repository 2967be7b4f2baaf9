"""The seconds of a step by a roofline: what a device computes and reads, at a stated share of its rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedConfig

from forge.engines.settings import EngineSettings
from forge.models.flops import causal, forward_flops

from .devices import Device

# Shares of the data sheet's rates. Training: prime-rl's published rows of 65,536 tokens reach .25 to .37. Decoding:
# weights and keys are read at .6 of the bandwidth; an H100 copies at .87 of it.
TRAINING = 0.33
PREFILL = 0.4
DECODING = 0.6
# The embedded engine on an H100 (docs/benchmarks.md): a layer's kernels take 47 microseconds whatever the batch, and
# half a millisecond where each is launched by itself; weights and keys are read at .22 of the bandwidth.
LAYER, LAUNCHED_LAYER = 47e-6, 0.5e-3
EMBEDDED = 0.22


@dataclass(frozen=True)
class Work:
    """The samples that a step of a recipe generates and trains.

    samples: completions. prompt, completion: mean tokens of each.
    """

    samples: int
    prompt: float
    completion: float


class DecodingCost(NamedTuple):
    """The seconds of a decode step: `kernels` and bytes over `rate` (a second) together, and `least` in any case."""

    kernels: float
    rate: float
    least: float = 0.0

    def seconds(self, size: float) -> float:
        """The seconds of a step that reads so many bytes."""
        return max(self.kernels + size / self.rate, self.least)


def decoding_cost(config: PreTrainedConfig, settings: EngineSettings, device: Device) -> DecodingCost:
    """The cost of an engine's steps on a device."""
    bandwidth = device.bandwidth * 1e9
    if settings.engine != "embedded":
        return DecodingCost(0.0, bandwidth * DECODING)
    layers = config.num_hidden_layers
    least = 0.0 if settings.captures(config, device.type) else LAUNCHED_LAYER * layers
    return DecodingCost(LAYER * layers, bandwidth * EMBEDDED, least)


def training_seconds(config: PreTrainedConfig, work: Work, device: Device, ranks: int, recompute: bool) -> float:
    """Seconds of the forward and backward passes of a batch on so many ranks."""
    length = work.prompt + work.completion
    tokens = work.samples * length
    forward = forward_flops(config, tokens, work.samples * causal(length), work.samples * work.completion)
    passes = 4 if recompute else 3
    return passes * forward / (ranks * device.tflops * 1e12 * TRAINING)


def scoring_seconds(config: PreTrainedConfig, work: Work, device: Device, ranks: int) -> float:
    """Seconds of one forward pass over a batch."""
    return training_seconds(config, work, device, ranks, False) / 3


def generation_seconds(
    config: PreTrainedConfig,
    work: Work,
    device: Device,
    *,
    replicas: int,
    slots: int,
    weights: float,
    token_bytes: float,
    decoding: DecodingCost,
) -> float:
    """Seconds until all samples of a step are complete, with `slots` at once on each replica.

    Args:
        weights: bytes that a decode step reads; token_bytes: of keys and values of a token.
    """
    share = work.samples / replicas
    # More samples than slots take turns; the last round is counted as a part of one.
    rounds = max(1.0, share / max(1, slots))
    running = min(share, slots)
    context = work.prompt + work.completion / 2
    # A decode step reads all weights once, whatever the batch, and the keys and values of every running sequence.
    read = weights + running * context * token_bytes
    flops = forward_flops(config, running, running * context, running)
    step = max(decoding.seconds(read), flops / (device.tflops * 1e12 * PREFILL))
    prefill = forward_flops(config, share * work.prompt, share * causal(work.prompt), 0)
    return rounds * work.completion * step + prefill / (device.tflops * 1e12 * PREFILL)


def update_seconds(weights: float, device: Device, hosts: int) -> float:
    """Seconds to bring a version of the weights to the engines: through the memory of a host, or the network."""
    # From the device to shared memory and back: PCIe of the fifth generation, 50 GB/s, each way.
    copies = 2 * weights / 50e9
    return copies if hosts == 1 else copies + weights / (device.network * 1e9)
