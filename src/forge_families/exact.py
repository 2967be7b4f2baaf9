"""Forward passes with the engine's bits, token by token (`training.exact`); gradients are of the ordinary functions.

The difference between engine and trainer is then 0 instead of rounding, and any other is a fault: stale weights,
another template, a wrong mask. Products by oneDNN are equal already; see `forge.models.exact` for the rest.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.models.exact import ACTIVATIONS, attend_by_query, attention_granule, bias_of, rms_norm_wide
from forge.training.linear import AVAILABLE, multiply_transposed
from forge.training.lora import LoraLinear
from forge.types import Batch

KEPT = 8  # earlier versions of the weights that a trainer keeps at most, by which it checks what they sampled
CHECKED = 16  # sequences of each of them that a step checks: their forward pass is in addition to the step's

Function = Callable[..., Tensor]


class EngineDifference(RuntimeError):
    """Error: engine and trainer computed different log-probabilities of a token under the same weights."""


class _Replaced(torch.autograd.Function):
    """Autograd function that computes one function and differentiates another, which is equal up to rounding."""

    @staticmethod
    def forward(ctx, exact: Function, smooth: Function, *inputs: Tensor) -> Tensor:
        ctx.smooth = smooth
        ctx.save_for_backward(*inputs)
        with torch.autocast("cpu", enabled=False):
            return exact(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        needs_gradient = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                x.detach().requires_grad_(is_needed)
                for x, is_needed in zip(ctx.saved_tensors, needs_gradient, strict=True)
            ]
            value = ctx.smooth(*inputs)
        grads = iter(torch.autograd.grad(value, [x for x in inputs if x.requires_grad], grad))
        return None, None, *(next(grads) if is_needed else None for is_needed in needs_gradient)


class ExactNorm(nn.Module):
    """RMSNorm as the engine computes it; the same parameters under the same names."""

    weight: nn.Parameter
    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `hidden_states` [..., dim], normalised over the last dimension."""
        # Gemma's weights are offsets from 1.
        is_offset = not hasattr(self, "variance_epsilon")
        weight = self.weight + 1 if is_offset else self.weight
        epsilon: Any = self.eps if is_offset else self.variance_epsilon

        return _Replaced.apply(
            lambda x, scale: rms_norm_wide(x, scale, epsilon),
            lambda x, scale: F.rms_norm(x, scale.shape, scale.to(x.dtype), epsilon),
            hidden_states,
            weight,
        )


class ExactEmbedding(nn.Embedding):
    """Embeddings in the precision of the forward pass, which the states between layers then have, as in the engine."""

    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings [..., dim] of token ids [...]."""
        rows = F.embedding(input, self.weight, self.padding_idx).to(self.dtype)
        scale = getattr(self, "embed_scale", None)  # Gemma's
        return rows if scale is None else rows * scale.to(self.dtype)


class ExactActivation(nn.Module):
    """An activation as the engine computes it.

    Args:
        name: transformers' name, one of `ACTIVATIONS`.
        smooth: the module that it replaces.
    """

    def __init__(self, name: str, smooth: nn.Module) -> None:
        super().__init__()
        self.exact, self.smooth = ACTIVATIONS[name], smooth

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of each number."""
        return _Replaced.apply(self.exact, self.smooth, x)


class _MergedProduct(torch.autograd.Function):
    """x @ (weight + b a).T: the product of the merged weight that the engine has; gradients by the factors."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        return multiply_transposed(x.flatten(0, -2), weight.addmm(b, a)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, a, b = ctx.saved_tensors
        flat, grad = x.flatten(0, -2), grad.flatten(0, -2)
        reduced = grad @ b
        grad_x = multiply_transposed(grad, weight.T).addmm_(reduced, a).view_as(x)
        return grad_x, None, reduced.T @ flat, grad.T @ (flat @ a.T)


class ExactLoraLinear(LoraLinear):
    """A linear layer whose forward pass has its adapter merged, as the engine has."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ (weight + scaling * B A).T, [..., out] for x [..., in]."""
        product = _MergedProduct.apply(x, self.weight, self.lora_A.weight, self.lora_B.weight * self.scaling)
        return product if self.bias is None else product + self.bias


def replace_modules(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace what rounds differently in the engine, in place: embeddings, norms, activations and adapters.

    Args:
        dtype: of the forward pass.

    Raises:
        ValueError: the device is not a CPU, or has no oneDNN or AVX2.
    """
    if not AVAILABLE or device.type != "cpu":
        raise ValueError("training.exact needs a CPU with AVX2, and torch with oneDNN")

    config: Any = model.config
    activation = getattr(config, "hidden_act", None) or config.hidden_activation

    for module in list(model.modules()):
        # The class is replaced, so that the module keeps its parameters and their names.
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            module.__class__ = type(kind.__name__, (ExactNorm, kind), {})
        elif isinstance(module, nn.Embedding):
            module.__class__ = type(kind.__name__, (ExactEmbedding, kind), {"dtype": dtype})
        elif kind is LoraLinear:
            module.__class__ = ExactLoraLinear
        for attribute in ("act_fn", "activation_fn"):
            if isinstance(getattr(module, attribute, None), nn.Module):
                setattr(module, attribute, ExactActivation(activation, getattr(module, attribute)))


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention of q [rows, heads, width, head_dim] to k and v as the engine computes it.

    The gradient is torch's attention's, which differs from the engine's by rounding only.

    Args:
        mask: [width, length] bool, whether each query sees each key.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The engine's keys are padded to a multiple of the granule, and the padding is masked.
        granule = attention_granule(q.shape[1] // k.shape[1], q.shape[3], scale)
        padding = -k.shape[2] % granule
        padded_k, padded_v = (F.pad(x.float(), (0, 0, 0, padding)).contiguous() for x in (k, v))
        bias = bias_of(~F.pad(mask, (0, padding)), torch.float32)
        return attend_by_query(q.float(), padded_k, padded_v, bias, scale).to(q.dtype)

    return _Replaced.apply(
        attend,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True),
        *(q, k, v),
    )


def check_difference(engine: Tensor, trainer: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Check that log-probabilities of engine and trainer under the same weights have the same bits, [checked] each.

    Args:
        tokens: their ids.
        positions: how many trained tokens of the same sequence come before each.

    Raises:
        EngineDifference: they differ; names the first token.
    """
    if different := (engine != trainer).nonzero().flatten().tolist():
        first = different[0]
        raise EngineDifference(
            f"training.exact: engine and trainer differ at {len(different)} of {len(engine)} tokens of the same "
            f"weights; the first is token {int(tokens[first])} at position {int(positions[first])} of an answer: "
            f"log-probability {engine[first]:.9g} by the engine, {trainer[first]:.9g} by the trainer. forge mismatch "
            "compares their layers"
        )


class EngineCheck:
    """Check that engine and trainer compute bit-identical log-probabilities under the weights that sampled the tokens.

    Args:
        policy: the trainer's model.
        score: returns the log-probabilities of a batch's tokens under the policy's weights, [tokens].
    """

    def __init__(self, policy: nn.Module, score: Callable[[Batch], np.ndarray]) -> None:
        trained = (parameter.detach() for parameter in policy.parameters() if parameter.requires_grad)
        # A rank's own part of each.
        self.weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained]
        self.score = score
        self.earlier: dict[int, list[Tensor]] = {}  # by version
        self.age = 0  # of the oldest token so far, in versions

    def check_current(self, inputs: Mapping[str, Any], current: Any, current_sequences: Any) -> None:
        """Check the tokens of a micro-batch that the version in training sampled.

        Args:
            inputs: of the loss, see `step.loss_inputs`.
            current, current_sequences: [trained] bool, see `trainer.sampled_by`.

        Raises:
            EngineDifference: they differ.
        """
        checked = current & current_sequences
        names = "behaviour_logprobs", "proximal_logprobs", "tokens", "positions"
        check_difference(*(inputs[name][checked] for name in names))

    def check_earlier(self, batch: Batch, version: int) -> Tensor:
        """Check sequences of earlier versions, and keep this version's weights while tokens may have them; return the
        differences of the checked tokens, which are 0.

        Raises:
            EngineDifference: they differ.
        """
        self.age = max(self.age, version - int(batch.versions[batch.mask & (batch.versions >= 0)].min(initial=version)))
        current_weights = [weight.clone() for weight in self.weights]
        differences = [torch.empty(0)]
        for earlier, earlier_weights in self.earlier.items():
            if (sequences_of_version := select_whole(batch, earlier)) is None:
                continue
            torch._foreach_copy_(self.weights, earlier_weights)
            scores = self.score(sequences_of_version)
            torch._foreach_copy_(self.weights, current_weights)

            has_logprob = sequences_of_version.mask & ~np.isnan(sequences_of_version.logprobs)
            sequence_index = np.repeat(np.arange(len(sequences_of_version)), sequences_of_version.lengths)

            # The position of each token among its sequence's tokens with mask True.
            positions = (
                np.cumsum(sequences_of_version.mask)
                - np.searchsorted(sequence_index[sequences_of_version.mask], sequence_index)
                - 1
            )
            columns = sequences_of_version.logprobs, scores, sequences_of_version.tokens, positions
            engine, trainer, *labels = (torch.from_numpy(column[has_logprob]) for column in columns)
            check_difference(engine, trainer, *labels)
            differences.append((engine - trainer).abs())

        self.earlier = dict(list(({version: current_weights} | self.earlier).items())[: min(self.age + 1, KEPT)])
        return torch.cat(differences)


def select_whole(batch: Batch, version: int) -> Batch | None:
    """Return the first sequences of a batch that one version of the policy sampled from beginning to end, at most
    `CHECKED`; None if there is none."""
    firsts = np.cumsum(batch.lengths) - batch.lengths
    is_whole = np.add.reduceat(batch.mask & (batch.versions != version), firsts) == 0
    whole_sequences = np.flatnonzero(is_whole & (np.add.reduceat(batch.mask, firsts) > 0))[:CHECKED]
    return batch.select(whole_sequences) if len(whole_sequences) else None
