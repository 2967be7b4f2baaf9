"""Drawing tokens: one uniform number per token, turned into a token through the cumulative distribution.

A token then depends on its own row's logits and number alone, never on what else is in the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forge.types import TOP_LOGPROBS, Sampling

MIN_TEMPERATURE = 1e-4  # below it, logits / temperature could overflow float32


def uniforms(seed: int, sample: int, count: int) -> Tensor:
    """The numbers in [0, 1) for one sample of a request, (count,); a longer count has the shorter one as prefix."""
    key = np.array([seed % 2**64, sample], dtype=np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).random(count, dtype=np.float32))


def narrows(sampling: Sampling) -> bool:
    """Whether top-k or top-p has an effect: greedy decoding has no distribution to cut."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits (B, V) with everything outside the top k and then the top-p nucleus at -inf. top_k, top_p: (B,)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(ranks >= limit[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    # A token stays if those before it do not reach top_p yet: the first always does. A top_p of 1 keeps all, which
    # rounding in the sum must not undo.
    outside = (probs.cumsum(-1) - probs >= top_p[:, None]) & (top_p[:, None] < 1)
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(outside, -torch.inf))


def draw(logits: Tensor, uniform: Tensor, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token a row: logits (B, V) and uniform (B,) -> token ids and log-probabilities under softmax, (B,) each.

    `logits` are already divided by the temperature and cut to the top. Rows marked in `greedy` (B,), if given, take
    the most likely token instead.
    """
    probs = logits.softmax(-1)
    total = probs.cumsum(-1)
    # Kept a rounding step below the total, the target always falls on a token with a probability above zero.
    target = uniform.clamp(max=1 - 2**-22)[:, None] * total[:, -1:]
    tokens = torch.searchsorted(total, target, right=True)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probs.gather(-1, tokens).log_()[:, 0]


def likeliest(logits: Tensor) -> list[dict[int, float]]:
    """The most likely tokens of each row, first the likeliest, with their log-probabilities as `draw` has them.

    Logits (B, V) as for `draw`. Up to 20 tokens whatever is asked for, so that which of two equals is taken does not
    depend on other rows; those that were cut away are not among them. The host waits for the device.
    """
    probs, tokens = logits.softmax(-1).topk(min(TOP_LOGPROBS, logits.shape[-1]))
    ids, logprobs = torch.stack([tokens.double(), probs.log_().double()]).tolist()
    return [
        {int(token): logprob for token, logprob in zip(*row, strict=True) if logprob > -torch.inf}
        for row in zip(ids, logprobs, strict=True)
    ]
