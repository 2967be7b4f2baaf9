"""Draws tokens from logits by inverse transform sampling: each row with its uniform number, whatever other rows do."""

import numpy as np
import torch
from torch import Tensor

from ..types import TOP_LOGPROBS


def draw_uniforms(seed: int, sample: int, count: int) -> Tensor:
    """Return the uniform random numbers in [0, 1) with which sample number `sample` of a request draws its tokens.

    They are (count,) float32 and depend on `seed` and `sample` only; a smaller count gives a prefix of the same ones.

    >>> draw_uniforms(seed=1, sample=0, count=2).shape
    torch.Size([2])
    """
    key = np.array([seed % 2**64, sample], dtype=np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).random(count, dtype=np.float32))


def keep_allowed(logits: Tensor, bits: Tensor) -> Tensor:
    """Return logits (B, V) with -inf for each token whose bit is 0: token t has bit t % 32 of bits[:, t // 32], int32.

    >>> keep_allowed(torch.zeros(1, 3), torch.tensor([[0b101]], dtype=torch.int32)).tolist()
    [[0.0, -inf, 0.0]]
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[-1]]
    return logits.masked_fill(allowed == 0, -torch.inf)


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return logits (B, V) with -inf for all but the top k tokens of a row, then all but the top-p nucleus of these.

    Args:
        top_k: (B,); 0 keeps all tokens.
        top_p: (B,); 1 keeps all tokens.

    >>> keep_top(torch.tensor([[3.0, 2.0, 1.0]]), top_k=torch.tensor([2]), top_p=torch.tensor([1.0])).tolist()
    [[3.0, 2.0, -inf]]
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    kept_count = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(ranks >= kept_count[:, None], -torch.inf)
    probs = ordered.softmax(-1)

    # A token stays if the sum of those before it does not reach top_p; the first always stays, also where top_p is 0 in
    # 32 bits. top_p = 1 keeps all, however the sum is rounded.
    sum_before = probs.cumsum(-1) - probs
    is_outside = (sum_before >= top_p[:, None]) & (top_p[:, None] < 1) & (ranks > 0)
    nucleus = ordered.masked_fill(is_outside, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, nucleus)


def draw_tokens(logits: Tensor, uniform: Tensor, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sample one token for each row; return token ids and their log-probabilities under softmax, (B,) each.

    A row with a logit that is NaN or infinite gets some token, with the log-probability NaN.

    Args:
        logits: (B, V), after temperature, grammar, top-k and top-p.
        uniform: (B,), the uniform random number of each row.
        greedy: (B,), rows that take the most likely token instead; None: no row does.

    >>> tokens, _ = draw_tokens(torch.zeros(2, 4), uniform=torch.tensor([0.1, 0.9]), greedy=None)
    >>> tokens.tolist()
    [0, 3]
    """
    probs = logits.softmax(-1)
    cumulative = probs.cumsum(-1)

    # A rounding step below the total, so that the target always falls on a token with positive probability.
    target = uniform.clamp(max=1 - 2**-22)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)

    # NaN compares as larger than all: `searchsorted` returns the index after the last token.
    tokens.clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)

    return tokens[:, 0], probs.gather(-1, tokens).log_()[:, 0]


def top_logprobs(logits: Tensor) -> list[dict[int, float]]:
    """Return log-probabilities by token id for each row of logits (B, V): up to 20 of the most likely tokens, in
    descending order, without those at -inf.

    It is 20 whatever the rows requested, so that ties do not break differently with other rows. Waits for the device.

    >>> [list(row) for row in top_logprobs(torch.tensor([[0.0, 2.0, -torch.inf]]))]
    [[1, 0]]
    """
    probs, tokens = logits.softmax(-1).topk(min(TOP_LOGPROBS, logits.shape[-1]))
    # One tensor, so that there is one copy from the device.
    token_rows, logprob_rows = torch.stack([tokens.double(), probs.log_().double()]).tolist()

    return [
        {int(token): logprob for token, logprob in zip(row_tokens, row_logprobs, strict=True) if logprob > -torch.inf}
        for row_tokens, row_logprobs in zip(token_rows, logprob_rows, strict=True)
    ]
