"""A meter of tensors without memory: what a forward and backward pass would hold at every moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge.training import flex, linear

A = TypeVar("A")
aten: Any = torch.ops.aten


class Moment(NamedTuple):
    """The bytes of complete gradients at a time of a backward pass.

    layers, root: of weights of decoder layers, and of all others; each is as large as its weight.
    """

    layers: int
    root: int


class Meter(TorchDispatchMode):
    """Counts the bytes of storages on the meta device within its block; those that exist before are not counted.

    peaks: at each moment the bytes that existed beside the weights and their complete gradients: at first, and at most.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.peaks: dict[Moment, tuple[int, int]] = {}
        self._moment = Moment(0, 0)
        self._others = 0
        self._is_fused = False
        self._sizes: dict[int, int] = {}
        self._gradients: dict[int, bool] = {}  # whether they are of a layer
        for name, weight in weights.items():
            self._sizes[_key(weight)] = 0
            if weight.requires_grad:
                is_inner = ".layers." in name
                weight.register_post_accumulate_grad_hook(lambda owner, kind=is_inner: self._note_gradient(owner, kind))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What the host reads of tensors without values: numbers that no path depends on.
        if function is aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].dtype.is_floating_point else 1
        result = (
            _grouped_product(*args, **kwargs) if function is aten._grouped_mm.default else function(*args, **kwargs)
        )
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._add(tensor)
        return result

    def fused(self, function: Callable[..., A]) -> Callable[..., A]:
        """A function that is compiled into one kernel, of which the results alone are in memory."""

        def call(*args: Any) -> A:
            self._is_fused = True
            try:
                results = function(*args)
            finally:
                self._is_fused = False
            for tensor in tree_leaves(results):
                self._add(tensor)
            return results

        return call

    def _add(self, tensor: Tensor) -> None:
        # Views share their storage, which is counted once.
        key = _key(tensor)
        if key in self._sizes or self._is_fused:
            return
        storage = tensor.untyped_storage()
        self._sizes[key] = storage.nbytes()
        weakref.finalize(storage, self._remove, key)
        self._others += self._sizes[key]
        self._note()

    def _remove(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._gradients:
            self._move(self._gradients.pop(key), -size)
        else:
            self._others -= size

    def _note_gradient(self, weight: nn.Parameter, is_inner: bool) -> None:
        # The first gradient of a weight is complete here; a later one would be added to it.
        gradient = weight.grad
        assert gradient is not None
        key = _key(gradient)
        if key in self._sizes and key not in self._gradients:
            self._gradients[key] = is_inner
            self._others -= self._sizes[key]
            self._move(is_inner, self._sizes[key])
            self._note()

    def _move(self, is_inner: bool, size: int) -> None:
        layers, root = self._moment
        self._moment = Moment(layers + size, root) if is_inner else Moment(layers, root + size)

    def _note(self) -> None:
        # A moment lasts from one complete gradient to the next.
        first, most = self.peaks.get(self._moment, (self._others, 0))
        self.peaks[self._moment] = first, max(most, self._others)


@contextmanager
def metered(weights: Mapping[str, nn.Parameter]) -> Iterator[Meter]:
    """A meter of all that is done within the block with a model of these weights, by name."""
    meter = Meter(weights)
    # On the meta device torch computes these by many operators, where devices have a kernel.
    kernels: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", _attention),
        (F, "rms_norm", _rms_norm),
        (flex, "_compiled_attention", lambda: _attention),
        (linear, "_compiled", meter.fused),
    ]
    before = [getattr(module, name) for module, name, _ in kernels]
    for module, name, kernel in kernels:
        setattr(module, name, kernel)
    try:
        with meter:
            yield meter
    finally:
        for (module, name, _), kernel in zip(kernels, before, strict=True):
            setattr(module, name, kernel)


class _Attention(torch.autograd.Function):
    """What kernels of attention hold: for the gradient their inputs, the result, and one number a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # The result has the layout of tokens before heads, as the kernels of a CPU and of a GPU return it.
        result = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        normaliser = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, normaliser)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Norm(torch.autograd.Function):
    """What the kernel of RMSNorm holds: its input, and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, _shape: Any, weight: Tensor, _eps: float) -> Tensor:
    return _Norm.apply(x, weight)


def _attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return _Attention.apply(query, key, value)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """The products of experts, of any dtype; torch knows the shape of those in bfloat16 alone."""
    rows = (len(offs), a.shape[0]) if a.dim() == b.dim() == 2 else (a.shape[-2],)
    return a.new_empty(*rows, b.shape[-1])


def _key(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata
