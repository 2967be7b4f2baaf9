"""An accelerator without hardware: its tensors say that they are on `emulated:0`, and compute in host memory.

An operator of its tensors and the CPU's raises `DeviceMix`, as CUDA would, and lines that make the host wait for the
device are counted. Numbers are the CPU's but for the order of sums. There are no kernels, no limits of memory, no
streams that run behind the host, and one device.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from forge.training import flex

NAME = "emulated"
SOURCE = "/src/forge/"
aten = torch.ops.aten

COPIES = (aten._to_copy.default, aten.copy_.default)
# Operators whose number of results or value the host has to know, alongside reads and copies.
READS = ("nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive", "equal")
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
# What autocast computes in its dtype on CUDA; all else it leaves as it is.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention")


class DeviceMix(RuntimeError):
    """Tensors of one operator are on two devices."""


@dataclass
class Emulation:
    """A device, and how often the host waited for it, by the line of the library and the reason.

    launches: operators that a device would have a kernel for. observers: by thread, what sees each operator, with its
    result; it counts its launches itself. copied: bytes by direction.
    """

    device: torch.device
    waits: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    copied: Counter[str] = field(default_factory=Counter)
    observers: dict[int, Callable[[Any, Sequence[Any], Any], None]] = field(default_factory=dict)

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """The waits of the block only."""
        before, part = self.waits.copy(), Counter[str]()
        yield part
        part.update(self.waits - before)


def lines(waits: Counter[str]) -> str:
    """Waits, for the message of a test that fails."""
    return "the host waits for the device\n" + "\n".join(f"{count} times: {line}" for line, count in waits.items())


def current() -> Emulation:
    """The device of the block that runs."""
    assert _current is not None, "no emulated device"
    return _current


_current: Emulation | None = None


class DeviceTensor(Tensor):
    """A tensor of the device; `memory` holds its values, on the CPU."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> DeviceTensor:
        """The device's tensor of this memory."""
        tensor = Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            layout=memory.layout,
            device=torch.device(NAME, 0),
        )
        tensor.memory = memory
        return tensor

    def tolist(self) -> Any:
        """As of any tensor; torch would read the device's memory without an operator."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Factories(TorchDispatchMode):
    """Operators without a tensor of the device, which may make or move one there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor's operators come back as those of its parts.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator, on the device if its tensors are or `device` says so."""
    leaves, spec = tree_flatten((args, kwargs))
    on_device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    on_host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)]
    wanted = kwargs.get("device")
    to_device = bool(on_device) if wanted is None else torch.device(wanted).type == NAME
    if not on_device and not to_device:
        return func(*args, **kwargs)
    assert _current is not None, "a tensor of the emulated device outlived it"
    if on_device and on_host and func not in COPIES:
        check(func, args, on_host)
    if reason := wait(func, args, kwargs, on_device, to_device):
        _current.waits[f"{place()} ({reason})"] += 1
    inner = [leaf.memory if isinstance(leaf, DeviceTensor) else leaf for leaf in leaves]
    inner_args, inner_kwargs = tree_unflatten(inner, spec)
    if wanted is not None:
        inner_kwargs["device"] = torch.device("cpu")
    result = compute(func, inner_args, inner_kwargs)
    if func in COPIES:
        source, into_device = (
            (args[1], isinstance(args[0], DeviceTensor)) if func is aten.copy_.default else (args[0], to_device)
        )
        if isinstance(source, DeviceTensor) != into_device:
            _current.copied["to the device" if into_device else "to the host"] += result.nbytes
    observer = _current.observers.get(threading.get_ident())
    if observer is not None:
        observer(func, inner, result)
    else:
        _current.launches += not func.is_view
    if func is aten.copy_.default:
        return args[0]
    if not to_device:
        return result
    result = tree_map(lambda x: DeviceTensor(x) if isinstance(x, Tensor) else x, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if on_device else result


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator in host memory."""
    if func is aten.histc.default and not args[0].is_floating_point():  # of integers on CUDA only
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def check(func: Any, args: Any, on_host: Sequence[Tensor]) -> None:
    """DeviceMix: a tensor in host memory is neither a scalar nor an index, which CUDA takes from there."""
    misplaced = [tensor for tensor in on_host if tensor.dim() > 0]
    if short_name(func) in INDEXED:
        misplaced = [tensor for tensor in misplaced if all(tensor is not index for index in tree_leaves(args[1]))]
    if misplaced:
        shapes = [tuple(tensor.shape) for tensor in misplaced]
        raise DeviceMix(f"{func}: tensors of shapes {shapes} are on the CPU, others on the device; {place()}")


def wait(
    func: Any, args: Any, kwargs: dict[str, Any], on_device: Sequence[DeviceTensor], to_device: bool
) -> str | None:
    """Why the host waits for the device in an operator; None: it does not."""
    name = short_name(func)
    if func in COPIES:
        target, source = args[:2] if func is aten.copy_.default else (None, args[0])
        to_device = to_device if target is None else isinstance(target, DeviceTensor)
        if isinstance(source, DeviceTensor) == to_device or kwargs.get("non_blocking") or True in args[2:]:
            return None
        cast = kwargs.get("dtype", source.dtype) if target is None else target.dtype
        direction = "to the device" if to_device else "to the host"
        return direction if cast in (None, source.dtype) else f"{direction} with a cast by the CPU"
    if not on_device:
        return None
    if func is aten._local_scalar_dense.default:
        return "item"
    if name in READS or func is aten.repeat_interleave.Tensor:
        return name
    if name in INDEXED:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "index by a mask"
        if not all(isinstance(index, DeviceTensor) for index in indices):
            return "index on the CPU"
    return None


def short_name(func: Any) -> str:
    """The operator's name without namespace and overload."""
    return func._schema.name.removeprefix("aten::")


def place() -> str:
    """The innermost line of the library that runs."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, inside, path = frame.f_code.co_filename.partition(SOURCE)
        if inside:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            return f"{path}:{frame.f_lineno} {line}"
        frame = frame.f_back
    return "outside the library"


class Module(_DummyBackendModule):
    """`torch.emulated`. Its streams have done all that they were given when a call returns."""

    current_stream = stream = Stream = Event = synchronize = set_rng_state = mock.MagicMock()

    def is_available(self) -> bool:
        """Within `emulated` only: other tests of the process compute on the CPU."""
        return _current is not None

    def get_rng_state(self, *_: Any) -> Tensor:
        """The host's, as its numbers are."""
        return torch.get_rng_state()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """For autocast."""
        return [torch.bfloat16, torch.float16]


class Hooks(_DummyPrivateUse1Hook):
    """What torch asks a backend in C++."""

    is_available = Module.is_available


def register() -> list[torch.library.Library]:
    """Make the device known to torch; the libraries hold what autocast does."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module(), hook=Hooks())
    others, products = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in PRODUCTS:
        products.impl(name, in_autocast_dtype(getattr(aten, name).default), "AutocastPrivateUse1")
    return [others, products]


def in_autocast_dtype(func: Any) -> Callable[..., Any]:
    """The operator of its float32 tensors in the dtype of autocast."""
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(leaf: Any) -> Any:
        single = isinstance(leaf, Tensor) and leaf.dtype == torch.float32
        return leaf.to(torch.get_autocast_dtype(NAME)) if single else leaf

    def lower(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(without):
            return func(*tree_map(cast, args), **tree_map(cast, kwargs))

    return lower


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float | None, enable_gqa: bool
) -> Tensor:
    """FlexAttention by its mask of every pair: query [1, heads, tokens, head_dim]."""
    blocks = [getattr(block_mask, name) for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices")]
    if any(block.device != query.device for block in blocks):
        raise DeviceMix("FlexAttention: its blocks are not on the device of the query")
    at = torch.arange(query.shape[2], device=query.device)
    seen: Any = block_mask.mask_mod(None, None, at[:, None], at)  # type: ignore[arg-type]
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype) @ value


# When imported: torch's first backward pass of a process starts its threads for the devices that it knows then.
LIBRARIES = register()


@contextmanager
def emulated() -> Iterator[Emulation]:
    """The device is torch's accelerator within the block, in all threads that start there.

    A trainer or engine made there cannot be used after it.
    """
    global _current
    start = threading.Thread.run

    def run_thread(thread: threading.Thread) -> None:
        torch._C._set_only_lift_cpu_tensors(True)
        with Factories():
            start(thread)

    lifting, swapping = torch._C._only_lift_cpu_tensors(), torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        for target, name, value in (
            (torch.accelerator, "empty_cache", lambda: None),
            (torch, "inference_mode", torch.no_grad),  # there a DeviceTensor could be no view of an ordinary one
            (flex, "_compiled_attention", lambda: dense_attention),
            (threading.Thread, "run", run_thread),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        # `torch.tensor` makes its values in host memory, then moves them.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifting)
        # A module that moves keeps its parameters, as between CPU and CUDA; between these classes only so.
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swapping)
        stack.enter_context(Factories())
        _current = Emulation(torch.device(NAME, 0))
        try:
            yield _current
        finally:
            _current = None


@contextmanager
def emulated_rank() -> Iterator[Emulation]:
    """The device of one of several ranks, whose collectives are gloo's, on the memory of its tensors.

    FSDP's buffers are not freed: the storage of a DeviceTensor has no size.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(dist.Backend.default_device_backend_map, {NAME: f"cpu:gloo,{NAME}:gloo"}))
        for name in ("free_storage", "alloc_storage"):
            stack.enter_context(mock.patch.object(_fsdp_param, name, return_value=None))
        stack.enter_context(mock.patch.object(_fsdp_init, "_move_states_to_device", move_states))
        yield stack.enter_context(emulated())


def move_states(parameters: Sequence[Tensor], buffers: Sequence[Tensor], device: torch.device) -> None:
    """As FSDP moves what is on another device; tensors of these classes are exchanged as wholes."""
    for tensor in (*parameters, *buffers):
        if not tensor.is_meta and tensor.device != device:
            torch.utils.swap_tensors(tensor, tensor.to(device))
