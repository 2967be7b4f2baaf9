"""How good a model is on what is held out: greedy accuracy on problems, or how it tells pairs apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..controller import Service
from ..observability import phase
from ..types import Batch, Sample
from .agent import Agent


async def evaluate(
    policy: Service, reward: Service | Agent, samples: Sequence[Sample], **sampling: Any
) -> dict[str, float]:
    """`{"eval/accuracy": share}` of `samples` whose greedy completion is right by the reward service's accuracy
    function; empty if there are no samples.

    Args:
        reward: or an agent, which plays its own episodes: see `Agent.evaluate`.
        sampling: what differs from greedy decoding under the policy's defaults.
    """
    if isinstance(reward, Agent):
        return await reward.evaluate(policy, samples, **sampling)
    if not samples:
        return {}

    async def one(sample: Sample) -> bool:
        completion = await policy.generate.route(sample.prompt, **{"temperature": 0.0, **sampling})
        return await reward.is_correct.route(prompt=sample.prompt, response=completion.text, target=sample.target)

    with phase("evaluate"):
        right = await asyncio.gather(*(one(sample) for sample in samples))
    return {"eval/accuracy": sum(right) / len(right)}


def evaluate_pairs(loss: Callable[..., Any], batch: Batch, **answers: np.ndarray) -> dict[str, float]:
    """`eval/loss` of held-out pairs, and the mean of everything that `loss.metrics` says of each of them.

    Args:
        loss: over named tensors, as the trainer's: `forge.losses.DPOLoss` or `forge.losses.BradleyTerryLoss`.
        batch: the pairs, packed as for training; with `ref_logprobs` if the loss asks for them.
        answers: what the trainer says of the batch, by the name that the loss has for it: `logprobs`, or `values` of a
            reward head; [tokens].

    Raises:
        ValueError: the loss asks for a tensor that is not there.
    """
    import torch

    from ..training.named import call_by_name

    arrays = {
        "weights": batch.weights,
        "sequences": np.repeat(np.arange(len(batch)), batch.lengths),
        "ref_logprobs": batch.ref_logprobs,
        **answers,
    }
    named = {name: None if given is None else torch.from_numpy(given[batch.mask]) for name, given in arrays.items()}
    each = call_by_name(loss.metrics, named)  # type: ignore[attr-defined]
    means = {f"eval/{name}": float(values.double().mean()) for name, values in each.items()}
    return {"eval/loss": float(call_by_name(loss, named)), **means}
