"""Chunked log-probabilities and entropies against float64 log_softmax, with gradients and the memory they take."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge.training.linear import gradient_of, scores_of, token_logprobs

TOKENS, DIM, VOCAB = 16, 6, 37


def inputs(tokens: int = TOKENS, dim: int = DIM, vocab: int = VOCAB, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Hidden states, head, labels and the gradients that arrive at the two outputs."""
    torch.manual_seed(0)
    hidden = (scale * torch.randn(tokens, dim)).requires_grad_()
    weight = torch.randn(vocab, dim, requires_grad=True)
    return hidden, weight, torch.randint(vocab, (tokens,)), torch.randn(tokens), torch.randn(tokens)


def oracle(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 256])
def test_token_logprob_values_and_gradients_match_oracle(temperature: float, chunk: int):
    hidden, weight, labels, to_logprobs, to_entropy = inputs()
    seen = (to_logprobs, to_entropy)
    outputs = token_logprobs(hidden, weight, labels, temperature=temperature, chunk=chunk)
    exact_inputs = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    exact = oracle(exact_inputs[0] @ exact_inputs[1].T, labels, temperature)
    for output, known in zip(outputs, exact, strict=True):
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), known, rtol=0, atol=1e-5)
    for which in ([0], [1], [0, 1]):  # through the log-probabilities, the entropies, and both
        cotangents = [seen[i] for i in which]
        got = torch.autograd.grad([outputs[i] for i in which], (hidden, weight), cotangents, retain_graph=True)
        wide = [c.double() for c in cotangents]
        expected = torch.autograd.grad([exact[i] for i in which], exact_inputs, wide, retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def test_token_logprobs_compute_logits_in_chunks():
    tokens, dim, vocab, chunk = 100, 4, 300, 8
    hidden, weight, labels, *_ = inputs(tokens, dim, vocab)
    with LargestTensor() as naive:
        (oracle(hidden @ weight.T, labels, 1.0)[0].sum()).backward()
    assert naive.elements == tokens * vocab
    with LargestTensor() as chunked:
        logprobs, entropy = token_logprobs(hidden, weight, labels, chunk=chunk)
        (logprobs.sum() + entropy.sum()).backward()
    assert chunked.elements == chunk * vocab


def test_autocast_logprob_gradients_match_forward_logits():
    """Logits of some 20 nats, which bfloat16 rounds by up to 0.06: recomputed otherwise they are off by as much."""
    hidden, weight, labels, seen, _ = inputs(scale=8.0)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _entropy = token_logprobs(hidden, weight, labels, chunk=5)
    got = torch.autograd.grad(logprobs, (hidden, weight), seen)
    logits = hidden.bfloat16() @ weight.bfloat16().T
    expected = torch.autograd.grad(oracle(logits.float(), labels, 1.0)[0], (hidden, weight), seen)
    torch.testing.assert_close(logprobs, oracle(logits.float(), labels, 1.0)[0], rtol=0, atol=1e-5)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.004 * b.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fused_token_logprobs_on_gpu_match_reference(temperature: float):
    """The functions that are compiled there, in host memory: scores, and the gradient of logits by autograd."""
    hidden, weight, labels, to_logprobs, to_entropy = inputs()
    logits = (hidden @ weight.T).detach().double().requires_grad_()
    logprobs, entropy = oracle(logits, labels, temperature)
    logprob, normaliser, spread = scores_of(logits.detach().float(), labels, temperature)
    torch.testing.assert_close(logprob.double(), logprobs.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(spread.double(), entropy.detach(), rtol=0, atol=1e-5)
    (expected,) = torch.autograd.grad([logprobs, entropy], logits, [to_logprobs.double(), to_entropy.double()])
    gradient = gradient_of(
        logits.detach().float(), labels, normaliser, spread, to_logprobs, to_entropy, temperature, torch.float32
    )
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=1e-5)
