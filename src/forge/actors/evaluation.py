"""Greedy accuracy on held-out problems."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..controller import Service
from ..observability import phase
from ..types import Sample


async def evaluate(policy: Service, reward: Service, samples: Sequence[Sample], **sampling: Any) -> dict[str, float]:
    """`{"eval/accuracy": share}` of `samples` whose greedy completion is right by the reward service's accuracy
    function; empty if there are no samples.

    Args:
        sampling: what differs from greedy decoding under the policy's defaults.
    """
    if not samples:
        return {}

    async def one(sample: Sample) -> bool:
        completion = await policy.generate.route(sample.prompt, **{"temperature": 0.0, **sampling})
        return await reward.is_correct.route(prompt=sample.prompt, response=completion.text, target=sample.target)

    with phase("evaluate"):
        right = await asyncio.gather(*(one(sample) for sample in samples))
    return {"eval/accuracy": sum(right) / len(right)}
