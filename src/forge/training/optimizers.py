"""The optimisers of a trainer: AdamW with state in a dtype that is set separately, or a class by its name; clipping."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from ..config.plugin import resolve
from .distributed import to_device
from .settings import OptimizerSettings

ParameterGroup = dict[str, Any]


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build the optimiser of `settings`, with weight decay on matrices only, not on norms and biases.

    Raises:
        ValueError: `settings.optimizer` names a class that does not exist.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups: list[ParameterGroup] = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]

    adam: Any = {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    if settings.optimizer != "adamw":
        return resolve(settings.optimizer, "training.optimizer")(groups, **adam)  # type: ignore[no-any-return]

    # torch's AdamW has its state in the dtype of the weights.
    state_dtype = settings.optimizer_dtype and getattr(torch, settings.optimizer_dtype)
    if all(state_dtype in (None, p.dtype) for p in trainable):
        return torch.optim.AdamW(groups, **adam, fused=True)
    return MixedAdamW(groups, state_dtype, **adam)


@torch.no_grad()
def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Initialise the state of an optimiser that has none, as before its first step. All ranks must call this.

    torch's `get_state_dict` makes that state by a step without gradient at rate 0 and counts this step: the first real
    step would then have the bias corrections of the second.
    """
    if optimizer.state:
        return
    _init_optim_state(optimizer)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


class MixedAdamW(torch.optim.Optimizer):
    """AdamW, computed in float32, with state of any dtype.

    With bfloat16 weights and float32 state, the state `remainder` has the difference between each weight and its exact
    float32 value, as 16 bits. No update is lost, and training equals training with float32 weights.

    Args:
        dtype: of the state; None: the dtype of each weight.
        adam: torch's arguments `lr`, `betas` and `eps`.
    """

    def __init__(self, groups: list[ParameterGroup], dtype: torch.dtype | None, **adam: Any) -> None:
        self.dtype = dtype
        super().__init__(groups, adam | {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. All ranks must call this."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimiser's state, each tensor in the dtype in which it was saved."""
        super().load_state_dict(state_dict)
        # torch has cast all state to the dtype of the weights: take the saved tensors instead.
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                if number in state_dict["state"]:
                    self.state[parameter] = dict(state_dict["state"][number])

    def _make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        dtype = self.dtype or parameter.dtype
        state = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        if parameter.dtype == torch.bfloat16 and dtype == torch.float32:
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    def _update_parameter(self, parameter: Tensor, group: ParameterGroup) -> None:
        # Update this rank's part of a parameter by AdamW in float32, whatever dtype weight and moments are stored in.
        if not self.state[parameter]:
            self.state[parameter] = self._make_state(parameter)

        # The stored tensors themselves if they are float32, else copies.
        state = {name: local_part(value) for name, value in self.state[parameter].items()}
        weight = local_part(parameter)
        exact = join_bits(weight, state["remainder"]) if "remainder" in state else weight.float()
        moments = [state[name].float() for name in ("exp_avg", "exp_avg_sq")]

        beta1, beta2 = group["betas"]
        adamw(
            [exact],
            [local_part(parameter.grad).float()],  # type: ignore[arg-type]
            [moments[0]],
            [moments[1]],
            [],
            [state["step"]],
            amsgrad=False,
            maximize=False,
            fused=True,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            if state[name].dtype != moment.dtype:
                state[name].copy_(moment)

        if "remainder" in state:
            split_bits(exact, weight, state["remainder"])
        elif weight.dtype != exact.dtype:
            weight.copy_(exact)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_bytes(state: Any) -> int:
    """Return the bytes of this rank's tensors in a nested dict; of DTensors only this rank's part counts."""
    if isinstance(state, dict):
        return sum(map(tensor_bytes, state.values()))
    return local_part(state).nbytes if isinstance(state, Tensor) else 0


def join_bits(weight: Tensor, remainder: Tensor) -> Tensor:
    """Reconstruct the float32 tensor that `split_bits` has written to a bfloat16 and an int16 tensor."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split_bits(exact: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write a float32 tensor to `weight`, rounded to the nearest bfloat16, and the rest of its bits to `remainder`.

    The remainder, int16, is the difference of the bits of both as integers.
    """
    bits = exact.view(torch.int32)
    upper_half = (bits + 0x8000) >> 16  # of 32 bits, rounded: the bits of a bfloat16
    weight.view(torch.int16).copy_(upper_half)
    remainder.copy_(bits - (upper_half << 16))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], bound: float, stages: int = 1) -> Tensor:
    """Scale gradients, sharded in any layout, to a global norm of at most `bound`, in place; return the norm before, a
    scalar. Parameters are divided over `stages` groups of ranks, or are on all. All ranks must call this."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, bound)

    # Each rank sums its squares, divided by the number of ranks with the same elements: each element counts once.
    local_gradients = []
    square_shares = []
    for gradient in gradients:
        shard_count = 1  # into which this gradient is sharded; ranks / parts have the same one
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            shard_count = math.prod(size for placement, size in sizes if not isinstance(placement, Replicate))
            gradient = gradient.to_local()
        local_gradients.append(gradient)
        square_shares.append(shard_count * stages / dist.get_world_size())

    squares = torch.stack(torch._foreach_norm(local_gradients)).double().square()
    weights = to_device({"shares": torch.tensor(square_shares, dtype=torch.float64)}, squares.device)["shares"]
    total = (squares * weights).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_(local_gradients, (bound / (norm + 1e-6)).clamp(max=1.0).float())

    return norm
