"""Modules of transformers with the engine's products: on a CPU in float32 a token has the same bits in any batch."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from forge.engines.experts import pad_rows
from forge.engines.linear import Linear, pack_weight
from forge.models.exact import rms_norm

ENGINE = "forge_engine"  # the name of the experts' function


class PackedWeight(Tensor):
    """The weight of a linear layer, packed for `F.linear`; other functions get the plain weight.

    It takes the place of a parameter, so that no module of transformers has to change.

    Attributes:
        linear: the product with it.
    """

    linear: Linear
    _plain: Tensor | None = None

    @classmethod
    def pack(cls, weight: Tensor, turned: bool = False) -> Tensor:
        """Return a weight (out, in), or (in, out) if `turned`, packed if that helps on its device."""
        linear = Linear.from_weight(weight.T.contiguous() if turned else weight)
        if not linear.weight.is_mkldnn:
            return weight
        # It has the shape of the weight, and the memory of one number.
        packed = weight.new_zeros(1).expand(weight.shape).as_subclass(cls)
        packed.linear = linear
        packed.turned = turned
        return packed

    turned: bool = False

    @property
    def plain(self) -> Tensor:
        """Return the weight as an ordinary tensor, which is unpacked once."""
        if self._plain is None:
            weight = self.linear.weight.to_dense()
            self._plain = weight.T if self.turned else weight
        return self._plain

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of PyTorch one of whose arguments is a packed weight."""
        kwargs = kwargs or {}
        if function is F.linear and type(args[1]) is cls and not args[1].turned:
            x, weight, bias, *_ = (*args, kwargs.get("bias"))
            return torch.ops.mkldnn._linear_pointwise(x, weight.linear.weight, bias, "none", [], "")
        if function is torch.addmm and type(args[2]) is cls and args[2].turned:
            bias, x, weight = args
            return torch.ops.mkldnn._linear_pointwise(x, weight.linear.weight, bias, "none", [], "")
        if getattr(function, "__name__", "") in ("__get__", "size", "dim", "__len__"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        # A conversion to the type that it has already leaves it packed.
        plain = {id(arg): arg for arg in args if type(arg) is cls}
        result = function(*(arg.plain if id(arg) in plain else arg for arg in args), **kwargs)
        return next((arg for arg in plain.values() if result is arg.plain), result)


class FusedNorm(nn.Module):
    """An RMSNorm in fewer operations; it takes the place of the class of a module that computes the same."""

    weight: Tensor
    variance_epsilon: float
    known: ClassVar[dict[type, bool]] = {}  # whether modules of a class compute the same

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., D) after RMSNorm."""
        return rms_norm(x, self.weight, self.variance_epsilon)

    @classmethod
    def replace_norms(cls, model: nn.Module) -> None:
        """Make all modules of a model that compute an RMSNorm as this class ones of this class."""
        for module in model.modules():
            kind = type(module)
            if not kind.__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
                continue
            if kind not in cls.known:
                x = torch.linspace(-3, 3, module.weight.numel()).view_as(module.weight)
                cls.known[kind] = torch.allclose(module(x), rms_norm(x, module.weight, module.variance_epsilon))
            if cls.known[kind]:
                module.__class__ = cls


def set_weight(module: nn.Module, name: str, weight: Tensor, is_packed: bool = True) -> None:
    """Set a parameter of a module, if `is_packed` packed where a linear layer or, on a CPU, experts multiply by it."""
    parameters: dict[str, Any] = module._parameters
    if not is_packed:
        parameters[name] = weight
        return
    # On other devices transformers computes experts.
    if weight.dim() == 3 and weight.device.type == "cpu" and hasattr(module, "is_transposed"):
        products = [pack_weight(matrix.T.contiguous() if module.is_transposed else matrix) for matrix in weight]
        module.__dict__.setdefault("products", {})[name] = products
        weight = weight[:0]
    elif weight.dim() == 2 and name == "weight" and not isinstance(module, nn.Embedding):
        weight = PackedWeight.pack(weight, isinstance(module, Conv1D))
    parameters[name] = weight


def use_experts(model: nn.Module) -> None:
    """Have all experts of a model be computed by `compute_experts`."""
    for module in model.modules():
        if hasattr(module, "is_transposed"):
            module.config._experts_implementation = ENGINE


def compute_experts(module: Any, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
    """Return the output (N, C) of a mixture for x (N, C), as `forge.engines.experts.Experts`: transformers' interface.

    Args:
        experts, gates: (N, k), of each token.
    """

    def multiply(rows: Tensor, name: str, expert: int) -> Tensor:
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        return Linear(module.products[name][expert], bias)(rows)

    if x.is_meta:  # a plan
        return x

    k = experts.shape[-1]
    first = "gate_up_proj" if module.has_gate else "up_proj"
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=len(module.products[first])).tolist()
    outputs = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            rows = F.pad(x[pairs // k], (0, 0, 0, pad_rows(len(pairs)) - len(pairs)))
            hidden = multiply(rows, first, expert)
            hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
            hidden = multiply(hidden, "down_proj", expert)
            if module.has_post_expert_norm:
                hidden = module.post_expert_norm(hidden)
            outputs[pairs] = hidden[: len(pairs)]

    outputs = outputs.view(len(x), k, -1)
    gates = gates.to(x.dtype)
    mixed = outputs[:, 0] * gates[:, :1]
    for i in range(1, k):
        mixed.addcmul_(outputs[:, i], gates[:, i, None])
    return mixed


ALL_EXPERTS_FUNCTIONS.register(ENGINE, compute_experts)
