"""Every algorithm against its paper written once more in plain Python, and against finite differences of that."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from forge.losses import ALGORITHMS, Correction, load_algorithm
from tests.algorithms import oracle

# Settings under which clips, bounds and gates are really met.
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.1, "clip_high": 0.3},
    "dr_grpo": {"clip_low": 0.1, "clip_high": 0.3},
    "dapo": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.4},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"clip_low": 0.4, "clip_high": 0.3},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.5},
    "rloo": {"clip_low": 0.3, "clip_high": 0.5},
    "reinforce": {"clip_ratio": 0.2},
    "reinforce++": {"clip_low": 0.1, "clip_high": 0.3},
    "ppo": {"clip_low": 0.1, "clip_high": 0.3},
    "decoupled_ppo": {"clip_low": 0.1, "clip_high": 0.3},
    "dro": {"penalty": 0.3},
    "distill": {"clip_high": 0.2},
}
LENGTHS = [5, 1, 3, 8, 2]


def call(loss_fn: torch.nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    """With the tensors that it takes by name, as the trainer calls it."""
    known = tensors | {"padding_mask": (tensors["weights"] != 0).double()}
    names = inspect.signature(loss_fn).parameters
    return loss_fn(**{name: known[name] for name in names if name in known})


def expected(name: str, lengths: list[int], **s: Any) -> tuple[float, list[float]]:
    sequences, _ = oracle.batch(lengths)
    return oracle.loss(name, sequences, **s), oracle.finite_differences(name, sequences, **s)


def gradient(value: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(value, tensors["logprobs"])[0]


def check(loss_fn: torch.nn.Module, name: str, lengths: list[int] = LENGTHS, **s: Any) -> None:
    _, tensors = oracle.batch(lengths)
    value = call(loss_fn, tensors)
    wanted, slopes = expected(name, lengths, **s)
    assert value.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert gradient(value, tensors).tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)


def test_every_registered_algorithm_has_test_settings():
    assert SETTINGS.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_algorithm_loss_and_gradient_match_oracle(name: str):
    own = {"correction": ("mask", "token", 0.0, 5.0)} if name == "decoupled_ppo" else {}
    check(load_algorithm(name, **SETTINGS[name]), name, **SETTINGS[name], **own)


@pytest.mark.parametrize("clip_ratio", [None, 0.0])
def test_reinforce_loss_at_extreme_clip_bounds_matches_oracle(clip_ratio: float | None):
    check(load_algorithm("reinforce", clip_ratio=clip_ratio), "reinforce", clip_ratio=clip_ratio)


@pytest.mark.parametrize("name", [n for n in SETTINGS if n != "distill"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_kl_and_entropy_loss_terms_match_oracle(name: str, kl: str):
    extra = {"beta": 0.3, "kl": kl, "kl_in": "loss", "entropy_coef": 0.2}
    own = {"correction": ("mask", "token", 0.0, 5.0)} if name == "decoupled_ppo" else {}
    check(load_algorithm(name, **SETTINGS[name], **extra), name, **SETTINGS[name], **extra, **own)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_sampling_corrections_match_oracle(name: str, kind: str, level: str):
    bounds = (0.8, 1.2)
    loss_fn = load_algorithm(name, **SETTINGS[name], correction=Correction(kind, level, *bounds))  # type: ignore[arg-type]
    check(loss_fn, name, **SETTINGS[name], correction=(kind, level, *bounds))


def test_kl_in_reward_does_not_change_loss():
    for name in ("ppo", "reinforce++"):
        check(load_algorithm(name, **SETTINGS[name], beta=0.5), name, **SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_packed_loss_equals_padded_loss_without_padding_gradient(name: str, lengths: list[int]):
    """Also with sequences without trained tokens, and NaN wherever nothing is trained."""
    loss_fn = load_algorithm(name, **SETTINGS[name], correction=Correction("mask", "sequence", 0.5, 2.0))
    _, packed = oracle.batch(lengths)
    rows = oracle.padded(packed, lengths)
    one, two = call(loss_fn, packed), call(loss_fn, {k: v for k, v in rows.items() if k != "sequences"})
    assert one.item() == pytest.approx(two.item(), rel=1e-12, abs=1e-15)
    flat, wide = gradient(one, packed), gradient(two, rows)
    torch.testing.assert_close(wide[rows["weights"] != 0], flat, rtol=1e-12, atol=1e-15)
    assert torch.equal(wide[rows["weights"] == 0], torch.zeros(int((rows["weights"] == 0).sum()), dtype=torch.float64))


@pytest.mark.parametrize("name", SETTINGS)
@given(lengths=st.lists(st.integers(0, 6), min_size=2, max_size=6), cut=st.integers(1, 5))
def test_micro_batch_losses_of_any_split_sum_to_batch_loss(name: str, lengths: list[int], cut: int):
    loss_fn = load_algorithm(name, **SETTINGS[name], correction=Correction("truncate", "geometric"))
    _, whole = oracle.batch(lengths)
    value = call(loss_fn, whole)
    parts = [part for part in (whole["sequences"] < cut, whole["sequences"] >= cut)]
    split = [{k: v[part] for k, v in whole.items()} for part in parts]
    split[1]["sequences"] = split[1]["sequences"] - cut
    values = [call(loss_fn, part) for part in split]
    assert sum(v.item() for v in values) == pytest.approx(value.item(), rel=1e-12, abs=1e-15)
    torch.testing.assert_close(gradient(values[0] + values[1], whole), gradient(value, whole), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("name", [n for n in SETTINGS if n != "distill"])
def test_policy_gradient_sign_follows_advantage(name: str, advantage: float):
    """On policy each token's gradient is its share of the negative advantage; RLOO's that of its sequence."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    known = {
        "logprobs": logprobs,
        "behaviour_logprobs": logprobs.detach(),
        "ref_logprobs": logprobs.detach(),
        "advantages": torch.full((3,), advantage),
        "weights": torch.full((3,), 1 / 3),
        "sequences": torch.tensor([0, 0, 1]),
    }
    call(load_algorithm(name), known).backward()
    shares = [2 / 3, 2 / 3, 1 / 3] if name == "rloo" else [1 / 3] * 3
    assert logprobs.grad is not None
    torch.testing.assert_close(-logprobs.grad, advantage * torch.tensor(shares))


def test_distillation_loss_expected_gradient_equals_reverse_kl():
    """The expectation of the sampled gradient over a whole vocabulary is that of KL(pi || teacher)."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    exact = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits, retain_graph=True)[0]
    # Every token once, weighted by how often it would be sampled.
    loss = load_algorithm("distill")(logp, logp.detach(), teacher, logp.detach().exp())
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], exact)


AWAY = {"clip_low": 0.999, "clip_high": 1e6}
FAR: dict[str, dict[str, Any]] = {
    **{name: AWAY for name in ("grpo", "dr_grpo", "ppo", "reinforce++", "gspo", "rloo", "decoupled_ppo")},
    "dapo": AWAY | {"dual_clip": None},
    "cispo": AWAY | {"clip_low": 1.0},
    "reinforce": {"clip_ratio": 1e6},
}


@pytest.mark.parametrize("name", FAR)
def test_clip_metrics_count_tokens_changed_by_clipping(name: str):
    """A token counts as limited exactly where moving the bounds far away changes its gradient."""
    loss_fn, unbounded = load_algorithm(name, **SETTINGS[name]), load_algorithm(name, **FAR[name])
    _, tensors = oracle.batch(LENGTHS)
    if name == "rloo":  # all tokens of a sequence share one gradient: it has one advantage
        tensors["advantages"] = tensors["advantages"][tensors["sequences"]]
    changed = gradient(call(loss_fn, tensors), tensors) != gradient(call(unbounded, tensors), tensors)
    names = inspect.signature(loss_fn.metrics).parameters
    reported = loss_fn.metrics(**{k: tensors[k] for k in names if k in tensors})["clip_fraction"].bool()
    assert reported.any()
    assert torch.equal(reported, changed)


def test_pickled_and_copied_algorithms_compute_the_same_loss():
    for name, chosen in SETTINGS.items():
        loss_fn = load_algorithm(name, **chosen)
        _, tensors = oracle.batch(LENGTHS)
        assert call(pickle.loads(pickle.dumps(loss_fn)), tensors).item() == call(copy.copy(loss_fn), tensors).item()
