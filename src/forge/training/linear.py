"""Linear layers: float32 products through oneDNN, and token log-probabilities without the whole matrix of logits.

torch gives float32 products on CPU to MKL, which keeps to AVX2 on processors that are not Intel's; oneDNN uses AVX-512
on all of them, at more than twice the speed, and with AVX2 only is a little faster too (docs/benchmarks.md).
The results differ by rounding only.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..system.devices import has_wide_products, type_of

A = TypeVar("A")

# oneDNN caches a kernel for every shape: callers pad rows to a multiple of this, or memory grows with every new length.
ROWS = 64
# Rows of logits at a time. On a CPU 256, which are 156 MB of a 152k vocabulary in float32. On a GPU as many as take
# half a gigabyte: each chunk adds to the head's whole gradient, and with 256 rows that took a third of an H100's step.
CHUNK = 256
CHUNK_BYTES = 2**29

AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _onednn_is_faster(a: Tensor, b: Tensor) -> bool:
    return (
        AVAILABLE
        and a.numel() > 0 < b.numel()
        and type_of(a.device) == type_of(b.device) == "cpu"
        and a.dtype == b.dtype == torch.float32
        and type(b) in (Tensor, nn.Parameter)  # a DTensor has its own operators
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # inductor mistakes products of another layout for oneDNN's
    )


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b.T` for matrices a [m, k] and b [n, k], without autograd, by oneDNN where that is faster."""
    if not _onednn_is_faster(a, b):
        return a @ b.T
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Not a view, which modules could not change in place.
        product = multiply_transposed(x.flatten(0, -2), weight)
        return torch.ops.aten._unsafe_view(product, [*x.shape[:-1], len(weight)])

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        grad_x = multiply_transposed(flat, weight.T).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = multiply_transposed(flat.T, x.flatten(0, -2).T) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


class FastLinear(nn.Linear):
    """nn.Linear with products by oneDNN where that is faster; the same parameters under the same names."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [..., out] for x [..., in]."""
        if not _onednn_is_faster(x, self.weight):
            return super().forward(x)
        product = _Linear.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


def speed_up(model: nn.Module) -> None:
    """Replace every nn.Linear of a model by a `FastLinear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


def at_least_float32(x: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged in float64."""
    return x if x.dtype == torch.float64 else x.float()


def rows_of_chunk(device: torch.device, vocabulary: int) -> int:
    """Return the number of rows of logits to compute at a time: on a CPU 256, else as many as take half a gigabyte."""
    return CHUNK if type_of(device) == "cpu" else max(CHUNK, CHUNK_BYTES // (4 * vocabulary) // ROWS * ROWS)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b.T` in float32 or a wider type. For half-precision matrices on CUDA its sums are never rounded to
    half precision."""
    if has_wide_products(a, b):
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return at_least_float32(multiply_transposed(a, b))


def scores_of(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the label's log-probability, the log-normaliser and the entropy, [rows] each, of the distributions
    softmax(logits / temperature); logits [rows, vocabulary], labels [rows]."""
    logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    logp = logits - normaliser[:, None]
    return logits.gather(-1, labels[:, None])[:, 0] - normaliser, normaliser, -(logp.exp() * logp).sum(-1)


def gradient_of(
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient with respect to logits [rows, vocabulary], in `dtype`.

    d logp(y) / d logit_j = [j = y] - p_j   and   d H / d logit_j = -p_j (logp_j + H)

    Args:
        labels, normaliser, entropy: [rows], of `scores_of`.
        grad_logprob, grad_entropy: [rows], the gradients with respect to the labels' log-probabilities and entropies.
    """
    logp = logits / temperature - normaliser[:, None]
    grad = logp.exp() * (-grad_entropy[:, None] * (logp + entropy[:, None]) - grad_logprob[:, None])

    # The term [j = y] of the label only.
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    grad = grad + torch.where(is_label, grad_logprob[:, None], 0.0)
    return (grad / temperature).to(dtype)


@lru_cache
def _compile_function(function: Callable[..., A]) -> Callable[..., A]:
    """Return the function compiled for any number of rows, cached: one pass over the logits instead of ten."""
    return torch.compile(function, dynamic=True)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies in chunks of rows: only one log-normaliser and one entropy per row are saved, and
    the backward pass computes a chunk's logits again."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int, exact: bool):
        # In chunks of rows, so that the logits of all rows never exist at once.
        head = weight.to(hidden.dtype)
        logprobs, normalisers, entropies = [], [], []

        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            if type_of(hidden.device) == "cpu":
                # As `scores_of`, in place: a new matrix of logits takes longer than the arithmetic.
                logits = at_least_float32(multiply_transposed(h, head)).div_(temperature)
                normaliser = logits.logsumexp(-1)
                if exact:  # the engine's formula
                    logprob = logits.softmax(-1).gather(-1, y[:, None]).log_()[:, 0]
                else:
                    logprob = logits.gather(-1, y[:, None])[:, 0] - normaliser
                logp = logits.sub_(normaliser[:, None])
                entropy = -(logp.exp() * logp).sum(-1)
            else:
                logprob, normaliser, entropy = _fuse_function(scores_of, h)(wide_product(h, head), y, temperature)

            logprobs.append(logprob)
            normalisers.append(normaliser)
            entropies.append(entropy)

        normaliser = torch.cat(normalisers)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk

        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
        # The logits of each chunk are computed again, which costs less than to keep them.
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # Accumulated in float32: thousands of small bf16 additions would be lost.
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

        rows = (x.split(ctx.chunk) for x in (hidden, labels, normaliser, entropy, grad_logprobs, grad_entropy))
        start = 0
        for h, y, norm, h_entropy, grad_logprob, grad_ent in zip(*rows, strict=True):
            if type_of(hidden.device) == "cpu":
                # As `gradient_of`, in place.
                logp = at_least_float32(multiply_transposed(h, head)).div_(ctx.temperature).sub_(norm[:, None])
                p = logp.exp()
                grad = logp.add_(h_entropy[:, None]).mul_(-grad_ent[:, None]).sub_(grad_logprob[:, None]).mul_(p)
                grad.scatter_add_(1, y[:, None], grad_logprob[:, None])
                grad = grad.div_(ctx.temperature).to(hidden.dtype)
            else:
                logits = wide_product(h, head)
                grad = _fuse_function(gradient_of, h)(
                    logits, y, norm, h_entropy, grad_logprob, grad_ent, ctx.temperature, hidden.dtype
                )

            grad_hidden[start : start + len(h)] = multiply_transposed(grad, head.T)
            if grad_weight is not None:
                grad_weight += wide_product(grad.T, h.T)
            start += len(h)

        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _fuse_function(function: Callable[..., A], rows: Tensor) -> Callable[..., A]:
    """Return the function, compiled if `rows` are on a GPU."""
    return _compile_function(function) if type_of(rows.device) in ("cuda", "xpu") else function


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the labels' log-probabilities and the entropies of softmax(hidden @ weight.T / temperature), in nats.

    Both are [tokens], differentiable, in float32, or float64 if the weights are.

    Args:
        hidden: [tokens, dim], the backbone's last states.
        weight: [vocabulary, dim], the head's.
        labels: [tokens], token ids.
        temperature: the sampler's.
        chunk: rows of logits at a time; None: `rows_of_chunk`.
        exact: on a CPU, compute log-probabilities by the engine's formula.
    """
    if not len(labels):
        # Keeps the graph connected: a rank with nothing to train still takes part in the backward collectives.
        empty = at_least_float32(hidden).sum(-1) + at_least_float32(weight).sum() * 0.0
        return empty, empty

    count = len(labels)
    padding = -count % ROWS
    hidden = F.pad(hidden, (0, 0, 0, padding))
    labels = F.pad(labels, (0, padding))

    # Backward runs outside autocast and must compute the same logits as forward.
    device = type_of(hidden.device)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    chunk = chunk or rows_of_chunk(hidden.device, len(weight))
    logprobs, entropy = _TokenLogprobs.apply(hidden.to(dtype), weight, labels, temperature, chunk, exact)
    return logprobs[:count], entropy[:count]
