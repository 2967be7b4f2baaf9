"""The optimisers of a trainer: AdamW, Muon and 8-bit AdamW, with state in a dtype that is set separately."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from .muon import Update, orthogonalise, rounds
from .settings import OptimizerSettings

ParameterGroup = dict[str, Any]

# Muon scaled as Liu et al. 2025 (arXiv 2502.16982): an update has the root mean square of AdamW's, about 0.2 of the
# learning rate.
MOMENTUM = 0.95
RMS = 0.2


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimiser of `settings`, with weight decay on matrices only, not on norms and biases.

    Muon is for the matrices of decoder layers: embeddings, heads, norms and biases are AdamW's.

    Raises:
        ImportError: adamw8bit without torchao.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = {name for name, p in trainable if settings.optimizer == "muon" and ".layers." in name and p.dim() >= 2}
    matrices = [p for name, p in trainable if p.dim() >= 2 and name not in inner]
    groups: list[ParameterGroup] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": [p for _, p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    adam: Any = {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    if settings.optimizer == "adamw8bit":
        settings.check_installed()
        from .lowbit import AdamW8bit

        return AdamW8bit(groups, **adam)
    # torch's AdamW has its state in the dtype of the weights.
    state_dtype = settings.optimizer_dtype and getattr(torch, settings.optimizer_dtype)
    if settings.optimizer == "adamw" and all(state_dtype in (None, p.dtype) for _, p in trainable):
        return torch.optim.AdamW(groups, **adam, fused=True)
    if inner:
        orthogonalised = [p for name, p in trainable if name in inner]
        groups.insert(0, {"params": orthogonalised, "weight_decay": settings.weight_decay, "muon": True})
    return MixedOptimizer(groups, state_dtype, **adam)


@torch.no_grad()
def begin(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that an optimiser has before its first step, where it has none. All ranks must call this.

    torch's `get_state_dict` makes it by a step without gradient at rate 0, which is counted: the bias corrections of
    the first real step would be those of the second.
    """
    if optimizer.state:
        return
    _init_optim_state(optimizer)
    for state in optimizer.state.values():
        if "step" in state:  # not of Muon
            state["step"].zero_()


class MixedOptimizer(torch.optim.Optimizer):
    """AdamW, and Muon in groups with `muon`: computed in float32, with state of any dtype.

    With bfloat16 weights and float32 state, `remainder` holds what rounding took from each weight, the low 16 bits of
    its float32 value. The two together are that value, so that no update is lost: training is that of float32 weights.

    Args:
        dtype: of the state; None: the dtype of each weight.
    """

    def __init__(self, groups: list[ParameterGroup], dtype: torch.dtype | None, **adam: Any) -> None:
        self.dtype = dtype
        super().__init__(groups, adam | {"weight_decay": 0.0, "muon": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. All ranks must call this."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["muon"]:
                for matrices in rounds(parameters):
                    orthogonalise([self._muon(parameter, group) for parameter in matrices])
                continue
            for parameter in parameters:
                self._adam(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both optimisers' state, each parameter's in its own type."""
        super().load_state_dict(state_dict)
        # torch has cast all state to the dtype of the weights.
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                if number in state_dict["state"]:
                    self.state[parameter] = dict(state_dict["state"][number])

    def _begin(self, parameter: Tensor, muon: bool) -> dict[str, Tensor]:
        dtype = self.dtype or parameter.dtype
        names = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq")
        state = {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
        if not muon:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        if parameter.dtype == torch.bfloat16 and dtype == torch.float32:
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    def _muon(self, parameter: Tensor, group: ParameterGroup) -> Update:
        """The update of a matrix, which is applied once it has its direction."""
        work = self._work(parameter, muon=True)
        momentum = work.moments["momentum_buffer"].lerp_(work.gradient, 1 - MOMENTUM)
        rate = group["lr"]
        decay = group["weight_decay"]

        def part() -> Tensor:
            return work.gradient.lerp(momentum, MOMENTUM)

        def apply(direction: Tensor) -> None:
            scale = rate * RMS * math.sqrt(max(parameter.shape[-2:]))
            work.exact.mul_(1 - rate * decay).add_(direction.to(work.exact.device), alpha=-scale)
            work.store()

        return Update(parameter, part, apply)

    def _adam(self, parameter: Tensor, group: ParameterGroup) -> None:
        work = self._work(parameter, muon=False)
        beta1, beta2 = group["betas"]
        adamw(
            [work.exact],
            [work.gradient],
            [work.moments["exp_avg"]],
            [work.moments["exp_avg_sq"]],
            [],
            [work.state["step"]],
            amsgrad=False,
            maximize=False,
            fused=True,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        work.store()

    def _work(self, parameter: Tensor, muon: bool) -> _Work:
        assert parameter.grad is not None
        if not self.state[parameter]:
            self.state[parameter] = self._begin(parameter, muon)
        state = {name: local(value) for name, value in self.state[parameter].items()}
        weight = local(parameter)
        exact = join_bits(weight, state["remainder"]) if "remainder" in state else weight.float()
        moments = {name: value.float() for name, value in state.items() if name not in ("step", "remainder")}
        return _Work(weight, local(parameter.grad).float(), exact, state, moments)


@dataclass(frozen=True)
class _Work:
    """What an update computes with, on this rank's part of a parameter: float32 tensors, or the stored ones themselves
    where they are float32."""

    weight: Tensor
    gradient: Tensor
    exact: Tensor
    state: dict[str, Tensor]
    moments: dict[str, Tensor]

    def store(self) -> None:
        """Write back to the dtypes in which weights and state are stored."""
        for name, value in self.moments.items():
            if self.state[name].dtype != value.dtype:
                self.state[name].copy_(value)
        if "remainder" in self.state:
            split_bits(self.exact, self.weight, self.state["remainder"])
        elif self.weight.dtype != self.exact.dtype:
            self.weight.copy_(self.exact)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def join_bits(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 tensor that `split_bits` has written to a bfloat16 and an int16 tensor."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split_bits(exact: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write a float32 tensor to `weight`, rounded to the nearest bfloat16, and its bits' distance to `remainder`."""
    bits = exact.view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight.view(torch.int16).copy_(high)
    remainder.copy_(bits - (high << 16))
