"""Sums in a fixed order on a CPU: what the engine and a trainer with `training.exact` compute with the same bits.

Each result depends on its row only, in any batch: a token's logits are then the same bits in a prompt, in a decoded
answer and in a packed batch. Products by oneDNN have that for 2 to 8 rows and for multiples of 8; here are norms,
activations and attention. `F.silu` and `F.gelu` compute the last elements of a tensor by another formula than the rest:
they are replaced by compositions of functions that do not.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST_GRANULE = 512  # positions; the limits of kernels for small products that were found are below 256


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x (..., D) after RMSNorm over its last dimension (Zhang and Sennrich 2019, arXiv:1910.07467). The weight
    is (D,), or has several of x's last dimensions."""
    size = x.shape[-1]
    if x.device.type != "cpu" or x.dtype != torch.float32:
        normed = F.rms_norm(x, (size,), weight if weight.dim() == 1 else None, eps)
        return normed if weight.dim() == 1 else normed * weight
    # On a CPU F.rms_norm has two temporary tensors of x's size. Each operation here rounds correctly; torch.hypot would
    # replace three of them, but its results depend on the number of rows.
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(as_float32(1 / size))
    return (x / square.add_(as_float32(eps)).sqrt_()).mul_(weight)


def rms_norm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `rms_norm` of x, computed in float32 and rounded once; the weight first has x's precision."""
    return rms_norm(x.float(), weight.to(x.dtype).float(), eps).to(x.dtype)


@lru_cache
def as_float32(number: float) -> Tensor:
    """Return a number as a cached float32 tensor, because converting it at each operation would take as long as the
    operation."""
    return torch.tensor(number, dtype=torch.float32)


@lru_cache
def attention_granule(group: int, head_dim: int, scale: float, longest: int = LONGEST_GRANULE) -> int:
    """Return the smallest step between attention's lengths at which this CPU computes scores of the same bits: 16 times
    a power of two, at most `longest`.

    Libraries round small products differently, each below its own limit: PyTorch has a loop for less than 400
    products, and MKL on Intel's processors a kernel that multiplies by `scale` at another place: up to 112 positions
    of 6 heads of 128, and 176 of 12 heads of 192. So the scores of `group` heads of `head_dim` are compared at each
    length.
    """
    limit = min(longest, LONGEST_GRANULE)
    random = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(8, rows, head_dim, generator=random) for rows in (group, limit))
    bias = torch.zeros(8, 1, limit)

    def compute_scores(length: int) -> Tensor:
        return torch.baddbmm(bias[:, :, :length], queries, keys[:, :length].transpose(1, 2), alpha=scale)

    # The longest product is the reference; a granule is right if all its multiples agree with it.
    expected = compute_scores(limit)
    granule = 16
    is_equal = {n: torch.equal(compute_scores(n), expected[:, :, :n]) for n in range(granule, limit, granule)}
    while granule < limit and not all(is_equal[length] for length in range(granule, limit, granule)):
        granule *= 2

    return min(granule, limit)


@lru_cache(maxsize=8)
def embedding_bag_indices(heads: int, group: int, length: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the inputs with which `torch.embedding_bag` sums the values of a layer of the cache, head by head.

    These are the indices (heads * group * length,) of the values that each query head sums, and the offset of each
    query head in them. A key-value head has `capacity` positions, and `group` query heads share it. The kernel takes
    half the time of `bmm`, and adds in the order of positions at any length.

    >>> embedding_bag_indices(1, group=2, length=2, capacity=4)
    (tensor([0, 1, 0, 1], dtype=torch.int32), tensor([0, 2], dtype=torch.int32))
    """
    first_of_head = torch.arange(heads, dtype=torch.int32)[:, None, None] * capacity
    positions = first_of_head + torch.arange(length, dtype=torch.int32)  # [heads, 1, length]
    indices = positions.expand(-1, group, -1).flatten()
    return indices, torch.arange(0, len(indices), length, dtype=torch.int32)


def bias_of(unseen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an attention bias in the shape of `unseen`: -inf where it is True, 0 elsewhere.

    >>> bias_of(torch.tensor([True, False]), torch.float32).tolist()
    [-inf, 0.0]
    """
    return torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)


def attend_by_query(
    queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor, scale: float, enable_gqa: bool = True
) -> Tensor:
    """Return the attention (rows, H, S, D) of queries (rows, H, S, D) to keys and values (rows, K, L, D), with the bits
    of decoding one query after the other.

    Each query and key-value head is a separate product, of the shape that a decode step has.

    Args:
        attn_mask: (S, L), what is added to scores: -inf where a query does not see a key. L is a multiple of
            `attention_granule`.
    """
    rows, kv_heads, length, _ = keys.shape
    attended = torch.empty_like(queries)
    attended_by_head, queries_by_head = (x.unflatten(1, (kv_heads, -1)).transpose(2, 3) for x in (attended, queries))
    query_count, group, head_dim = queries_by_head.shape[2:]
    bag_indices = embedding_bag_indices(1, query_count * group, length, length)

    for row in range(rows):
        for head in range(kv_heads):
            shared_keys = keys[row, head].T.expand(query_count, head_dim, length)
            scores = torch.baddbmm(attn_mask[:, None], queries_by_head[row, head], shared_keys, alpha=scale)
            weights = scores.softmax(-1).view(-1)
            sums = torch.embedding_bag(values[row, head], *bag_indices, mode=0, per_sample_weights=weights)[0]
            attended_by_head[row, head] = sums.view(query_count, group, head_dim)

    return attended


def rotate_heads(heads: Tensor, turned: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads * cos + turned * sin, each product rounded to the tables' precision, as transformers does."""
    return (heads * cos).add_(turned * sin).to(heads.dtype)


def compute_silu(x: Tensor) -> Tensor:
    """Return the SiLU activation, x / (1 + exp(-x)).

    >>> compute_silu(torch.tensor([0.0])).item()
    0.0
    """
    wide = x.float()
    divisor = wide.neg().exp_().add_(1)
    return torch.div(wide, divisor, out=divisor).to(x.dtype)


def compute_gelu(x: Tensor) -> Tensor:
    """Return the tanh form of GELU (Hendrycks and Gimpel 2016).

    >>> compute_gelu(torch.tensor([0.0])).item()
    0.0
    """
    wide = x.float()
    inner = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_((2 / torch.pi) ** 0.5)
    return inner.tanh_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


# By the names of transformers' configurations.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": compute_silu, "gelu_pytorch_tanh": compute_gelu}
