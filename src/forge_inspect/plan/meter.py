"""A meter of memory on the meta device: how many bytes a forward and backward pass would hold at every moment."""

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
    """A moment of a backward pass, by the bytes of the gradients that are complete.

    layers: of weights in decoder layers. root: of all other weights.
    """

    layers: int
    root: int


class Meter(TorchDispatchMode):
    """Counter of the bytes of meta-device storages that are allocated within its block.

    Args:
        weights: of the model, by name.

    Attributes:
        peaks: for each moment the bytes other than weights and complete gradients: at its start, and at most.
        held: these bytes now.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.peaks: dict[Moment, tuple[int, int]] = {}
        self._moment, self.held = Moment(0, 0), 0
        self._is_fused = False
        self._sizes: dict[int, int] = {}  # bytes of each storage, by its key
        self._gradients: dict[int, bool] = {}  # complete ones, by their storage: whether they are of a decoder layer
        for name, weight in weights.items():
            self._sizes[_storage_key(weight)] = 0
            if weight.requires_grad:
                is_inner = ".layers." in name
                weight.register_post_accumulate_grad_hook(lambda owner, kind=is_inner: self._note_gradient(owner, kind))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `item()` of a tensor without values: any number will do, as no branch depends on it.
        if function is aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].dtype.is_floating_point else 1
        result = (
            _grouped_product(*args, **kwargs) if function is aten._grouped_mm.default else function(*args, **kwargs)
        )
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._add_tensor(tensor)
        return result

    def fused(self, function: Callable[..., A]) -> Callable[..., A]:
        """Return a function whose memory is counted as if it were one compiled kernel: only its results are counted."""

        def call_fused(*args: Any) -> A:
            self._is_fused = True
            try:
                results = function(*args)
            finally:
                self._is_fused = False
            for tensor in tree_leaves(results):
                self._add_tensor(tensor)
            return results

        return call_fused

    def _add_tensor(self, tensor: Tensor) -> None:
        # Views share their storage, which is counted once.
        key = _storage_key(tensor)
        if key in self._sizes or self._is_fused:
            return
        storage = tensor.untyped_storage()
        self._sizes[key] = storage.nbytes()
        weakref.finalize(storage, self._remove_tensor, key)
        self.held += self._sizes[key]
        self._note_peak()

    def _remove_tensor(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._gradients:
            self._move_size(self._gradients.pop(key), -size)
        else:
            self.held -= size

    def _note_gradient(self, weight: nn.Parameter, is_inner: bool) -> None:
        # Called when a gradient of a weight is complete: the first time it is counted, later ones are added to it.
        key = _storage_key(weight.grad)  # type: ignore[arg-type]
        if key in self._sizes and key not in self._gradients:
            self._gradients[key] = is_inner
            self.held -= self._sizes[key]
            self._move_size(is_inner, self._sizes[key])
            self._note_peak()

    def _move_size(self, is_inner: bool, size: int) -> None:
        layers, root = self._moment
        self._moment = Moment(layers + size, root) if is_inner else Moment(layers, root + size)

    def _note_peak(self) -> None:
        # A moment lasts from one complete gradient to the next.
        first, most = self.peaks.get(self._moment, (self.held, 0))
        self.peaks[self._moment] = first, max(most, self.held)


@contextmanager
def measure_block(weights: Mapping[str, nn.Parameter]) -> Iterator[Meter]:
    """Yield a meter that counts the memory of what the block does with a model of these weights, by name.

    Within the block attention, RMSNorm and compiled functions are replaced by functions that allocate what the kernels
    of a device would.
    """
    meter = Meter(weights)
    # On the meta device torch computes these by many operators, for which devices have one kernel.
    kernels: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", _plan_attention),
        (F, "rms_norm", lambda x, shape, weight, eps: _Norm.apply(x, weight)),
        (flex, "_compiled_attention", lambda: _plan_attention),
        (linear, "_compile_function", meter.fused),
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
    """Stand-in that allocates the memory of attention kernels, and keeps inputs, result and one number a row for the
    backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Heads have the width of the values. Tokens come before heads, as kernels of a CPU and of a GPU return them.
        batch, heads, tokens, _ = query.shape
        result = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:3], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Norm(torch.autograd.Function):
    """Stand-in that allocates the memory of the RMSNorm kernel, and keeps its input and one number a row for the
    backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _plan_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return _Attention.apply(query, key, value)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Return the result of a grouped product of any dtype; on the meta device torch supports only bfloat16."""
    rows = (len(offs), a.shape[0]) if a.dim() == b.dim() == 2 else (a.shape[-2],)
    return a.new_empty(*rows, b.shape[-1])


def _storage_key(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


class PlannedExperts(nn.Module):
    """Stand-in on the meta device for one rank's experts of a layer, with the allocations of TorchTitan's experts.

    It has the tensors of `forge_titan.policy.TitanExperts` and of TorchTitan's `AllToAllTokenDispatcher`, replaces the
    experts of a transformers model and has the names of their weights. A rank receives as many rows as it sends: tokens
    are assumed to be divided equally.

    Args:
        experts: the module of transformers with the experts of all ranks.
        degree: number of ranks that divide the experts between them; must divide their number.
        has_grouped_kernel: one kernel computes all experts, as on a GPU in bfloat16; otherwise each has its own.
    """

    def __init__(self, experts: nn.Module, degree: int, has_grouped_kernel: bool) -> None:
        super().__init__()
        gate_up: Tensor = experts.get_parameter("gate_up_proj")
        down: Tensor = experts.get_parameter("down_proj")
        self.count, self.degree = len(gate_up) // degree, degree
        self.has_grouped_kernel = has_grouped_kernel
        # Not views: those would hold the weights of all ranks.
        self.gate_up_proj = nn.Parameter(gate_up.new_empty(self.count, *gate_up.shape[1:]))
        self.down_proj = nn.Parameter(down.new_empty(self.count, *down.shape[1:]))

    def forward(self, hidden: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Return a result of the shape of `hidden`, [tokens, width]; `experts` and `gates` are [tokens, k]."""
        tokens, k = experts.shape
        routes = torch.zeros(tokens, self.count * self.degree, dtype=torch.bool, device=hidden.device)
        order = experts.reshape(-1).argsort(stable=True)
        scores, rows = gates.reshape(-1)[order], order // k
        # Tensors are deleted when TorchTitan's are.
        received, order_received = self._dispatch_rows(hidden, rows)
        computed = self._compute_experts(received)
        del received

        if self.degree > 1:
            by_rank = computed.new_empty(computed.shape)
            by_rank[order_received] = computed
            computed = _Exchange.apply(by_rank)
            del by_rank

        # The scores are multiplied in float32, whatever the dtype of the passes.
        weighted = (computed.to(torch.float32) * scores[:, None]).to(computed.dtype)
        result = torch.zeros_like(hidden).scatter_add(0, rows[:, None].expand(-1, hidden.shape[1]), weighted)
        del routes  # the map of tokens lives as long as the layer's forward pass

        return result

    def _dispatch_rows(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that this rank's experts compute, [tokens * k, width], and their indices as received."""
        sent = hidden[rows]
        if self.degree == 1:
            return sent, rows
        received = _Exchange.apply(sent)
        order_received = torch.empty_like(rows)
        # `sent` is kept until the rows are sorted by expert.
        return received[order_received], order_received

    def _compute_experts(self, x: Tensor) -> Tensor:
        if self.has_grouped_kernel:
            ends = torch.empty(self.count, dtype=torch.int32, device=x.device)
            gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(-2, -1), offs=ends).chunk(2, -1)
            return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)
        outputs = []
        for part, gate_up, down in zip(x.tensor_split(self.count), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts, forward and backward: allocates a new tensor of the same shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(gradients[0])


def divide_experts(model: nn.Module, degree: int, has_grouped_kernel: bool) -> None:
    """Replace the experts in each mixture of a transformers model by those of one rank; see `PlannedExperts`."""
    for module in list(model.modules()):
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module):
            module.register_module("experts", PlannedExperts(experts, degree, has_grouped_kernel))
