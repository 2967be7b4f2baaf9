"""Map requests to vLLM's SamplingParams, and parse its top log-probabilities."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..types import Completion, Sampling
from .interface import Listener


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with n samples to draw, each at most `limit` tokens long."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    stops: list[int]
    priority: int
    listener: Listener | None = None
    future: Future[list[Completion]] = field(default_factory=Future)


def sampling_params(request: Request, sample: int, vocab: int) -> Any:
    """vLLM's SamplingParams for one sample of a request to a model of `vocab` tokens."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling, seed = request.sampling, request.sampling.seed
    if seed is not None:
        # Hashed with the sample's number: samples of neighbouring seeds must not be shifted copies of each other.
        digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
    return SamplingParams(
        max_tokens=request.limit,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        stop_token_ids=request.stops,
        ignore_eos=True,  # it is among the stop tokens
        logprobs=min(sampling.top_logprobs, vocab),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        # Without a listener the first token is reported when it is there, the others at the end.
        stream_interval=None if request.listener else 2**30,
    )


def top_logprobs(positions: Iterable[Mapping[int, Any]], count: int) -> list[dict[int, float]]:
    """`Completion.top_logprobs` from vLLM's output of each position: `count` tokens, and the sampled one."""
    if count == 0:
        return []
    ranked = (sorted(position.items(), key=lambda item: item[1].rank) for position in positions)
    return [
        {token: entry.logprob for token, entry in position if entry.rank <= count and math.isfinite(entry.logprob)}
        for position in ranked
    ]
