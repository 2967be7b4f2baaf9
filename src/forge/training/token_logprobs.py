"""Log-probabilities and entropies of given tokens without ever holding the [tokens, vocabulary] matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_linear import ROWS, product

# Rows of logits that exist at a time: 256 rows of a 152k vocabulary are 156 MB in float32.
CHUNK = 256


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps one log-normaliser and one entropy per row; backward computes each chunk's logits again."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int):
        head = weight.to(hidden.dtype)
        logprobs, normalisers, entropies = [], [], []
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = product(h, head).float().div_(temperature)
            normaliser = logits.logsumexp(-1)
            taken = logits.gather(-1, y[:, None])[:, 0]
            logp = logits.sub_(normaliser[:, None])
            entropies.append(-(logp.exp() * logp).sum(-1))
            logprobs.append(taken - normaliser)
            normalisers.append(normaliser)
        normaliser, entropy = torch.cat(normalisers), torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        grad_hidden, head = torch.empty_like(hidden), weight.to(hidden.dtype)
        # Accumulated in float32: thousands of small bf16 additions would be lost.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        rows = (x.split(ctx.chunk) for x in (hidden, labels, normaliser, entropy, grad_logprobs, grad_entropy))
        at = 0
        for h, y, lse, ent, g_logp, g_ent in zip(*rows, strict=True):
            logp = product(h, head).float().div_(ctx.temperature).sub_(lse[:, None])
            p = logp.exp()
            # d logp(y) / d logit_j = [j = y] - p_j   and   d H / d logit_j = -p_j (logp_j + H)
            grad = logp.add_(ent[:, None]).mul_(-g_ent[:, None]).sub_(g_logp[:, None]).mul_(p)
            grad.scatter_add_(1, y[:, None], g_logp[:, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[at : at + len(h)] = product(grad, head.T)
            if grad_weight is not None:
                grad_weight += product(grad.T, h.T)
            at += len(h)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels`, and entropies, under softmax(hidden @ weight.T / temperature).

    Both outputs are differentiable.

    Args:
        hidden: [tokens, dim].
        weight: [vocabulary, dim].
        labels: [tokens].
        temperature: that of the sampler; the trainer must score the distribution that was sampled.

    Returns:
        (logprobs [tokens], entropy [tokens]) in float32, in nats.
    """
    if not len(labels):
        # Keeps the graph connected, so that a rank with nothing to train still runs its backward collectives.
        nothing = hidden.float().sum(-1) + weight.float().sum() * 0.0
        return nothing, nothing
    count, surplus = len(labels), -len(labels) % ROWS
    hidden, labels = F.pad(hidden, (0, 0, 0, surplus)), F.pad(labels, (0, surplus))
    device = hidden.device.type
    # Backward runs outside autocast and has to compute the logits that forward saw.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    logprobs, entropy = _TokenLogprobs.apply(hidden.to(dtype), weight, labels, temperature, chunk)
    return logprobs[:count], entropy[:count]
