"""Every policy-gradient loss once more, from its paper: plain Python floats, one token at a time, nothing shared.

`at` holds the log-probabilities at which whatever passes no gradient is evaluated, so that a finite difference of these
values is the gradient that a loss should have.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Token:
    logp: float
    at: float  # logp, where it passes no gradient
    behaviour: float
    proximal: float
    ref: float
    advantage: float
    entropy: float
    weight: float


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    least = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    return max(least, dual * advantage) if dual is not None and advantage < 0 else least


def surrogates(name: str, tokens: list[Token], old: str, **s: float) -> list[float]:
    """What each token of one sequence maximises."""
    ratios = [math.exp(t.logp - getattr(t, old)) for t in tokens]
    fixed = [math.exp(t.at - getattr(t, old)) for t in tokens]
    rows = list(zip(tokens, ratios, fixed, strict=True))
    low, high = s.get("clip_low", 0.2), s.get("clip_high", 0.2)
    if name in ("grpo", "dr_grpo", "ppo", "decoupled_ppo", "reinforce++"):
        return [ppo(r, t.advantage, low, high) for t, r, _ in rows]
    if name == "dapo":
        return [ppo(r, t.advantage, low, s["clip_high"], s["dual_clip"]) for t, r, _ in rows]
    if name == "gspo":
        mean = math.exp(sum(t.at - getattr(t, old) for t in tokens) / len(tokens))
        return [ppo(mean * math.exp(t.logp - t.at), t.advantage, low, high) for t in tokens]
    if name == "rloo":
        product = math.exp(sum(t.logp - getattr(t, old) for t in tokens))
        return [ppo(product, t.advantage, low, high) for t in tokens]
    if name == "cispo":
        return [clip(f, 1 - low, 1 + high) * t.advantage * t.logp for t, _, f in rows]
    if name == "sapo":
        taus = [s["tau_positive"] if t.advantage > 0 else s["tau_negative"] for t in tokens]
        return [
            4 / tau / (1 + math.exp(-tau * (r - 1))) * t.advantage for tau, (t, r, _) in zip(taus, rows, strict=True)
        ]
    if name == "reinforce":
        bound = math.inf if s["clip_ratio"] is None else 1 + s["clip_ratio"]
        return [(min(f, bound) if bound < math.inf else 1.0) * t.advantage * t.logp for t, _, f in rows]
    if name == "dro":
        return [t.advantage * t.logp - s["penalty"] / 2 * (t.logp - getattr(t, old)) ** 2 for t in tokens]
    if name == "distill":
        return [min(f, 1 + high) * (t.ref - t.at) * t.logp for t, _, f in rows]
    raise AssertionError(name)


def corrections(tokens: list[Token], kind: str, level: str, low: float, high: float) -> list[float]:
    logs = [t.proximal - t.behaviour for t in tokens]
    shared = {"sequence": sum(logs), "geometric": sum(logs) / len(logs)}
    ratios = [math.exp(log if level == "token" else shared[level]) for log in logs]
    return [min(r, high) if kind == "truncate" else r if low <= r <= high else 0.0 for r in ratios]


def divergence(token: Token, estimator: str) -> float:
    d = token.ref - token.logp
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]


def loss(name: str, sequences: list[list[Token]], **s) -> float:
    """The whole loss; `s` are the algorithm's settings, all of them."""
    correction = s.get("correction")
    total = 0.0
    for tokens in filter(None, sequences):
        best = surrogates(name, tokens, "behaviour" if correction is None else "proximal", **s)
        factors = [1.0] * len(tokens) if correction is None else corrections(tokens, *correction)
        for token, surrogate, factor in zip(tokens, best, factors, strict=True):
            value = -factor * surrogate - s.get("entropy_coef", 0.0) * token.entropy
            if s.get("kl_in", "loss") == "loss":
                value += s.get("beta", 0.0) * divergence(token, s.get("kl", "k3"))
            total += token.weight * value
    return total


def finite_differences(name: str, sequences: list[list[Token]], step: float = 1e-6, **s) -> list[float]:
    """The derivative by each trained token's log-probability, in order."""
    found = []
    for token in (token for tokens in sequences for token in tokens):
        middle = token.logp
        token.logp = middle + step
        above = loss(name, sequences, **s)
        token.logp = middle - step
        below = loss(name, sequences, **s)
        token.logp = middle
        found.append((above - below) / (2 * step))
    return found


def batch(lengths: list[int], seed: int = 0, spread: float = 0.3) -> tuple[list[list[Token]], dict[str, Tensor]]:
    """Random sequences of so many trained tokens (0 is a sequence without any), as tokens and as packed tensors."""
    random = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> list[float]:
        return (scale * torch.randn(sum(lengths), generator=random, dtype=torch.float64)).tolist()

    logp = [-2.0 + x for x in draw()]
    columns = {
        "logprobs": logp,
        "behaviour_logprobs": [a + b for a, b in zip(logp, draw(spread), strict=True)],
        "proximal_logprobs": [a + b for a, b in zip(logp, draw(spread), strict=True)],
        "ref_logprobs": [a + b for a, b in zip(logp, draw(spread), strict=True)],
        "advantages": draw(),
        "entropy": [abs(x) for x in draw()],
    }
    # One weight a sequence, as packing makes them.
    share = torch.rand(len(lengths), generator=random, dtype=torch.float64).tolist()
    numbers = [i for i, length in enumerate(lengths) for _ in range(length)]
    columns["weights"] = [share[i] for i in numbers]
    rows = list(zip(*columns.values(), strict=True))
    tokens = [Token(row[0], *row) for row in rows]
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    tensors["logprobs"].requires_grad_()
    tensors["sequences"] = torch.tensor(numbers, dtype=torch.int64)
    return [[t for t, i in zip(tokens, numbers, strict=True) if i == n] for n in range(len(lengths))], tensors


def padded(packed: dict[str, Tensor], lengths: list[int], fill: float = math.nan) -> dict[str, Tensor]:
    """The same as [sequences, width], with `fill` wherever nothing is trained, one column more than is needed."""
    width = max(lengths, default=0) + 1
    columns = {name: values for name, values in packed.items() if name != "sequences"}
    rows = {}
    for name, values in columns.items():
        out = torch.full((len(lengths), width), 0.0 if name == "weights" else fill, dtype=torch.float64)
        at = 0
        for i, length in enumerate(lengths):
            out[i, :length] = values.detach()[at : at + length]
            at += length
        rows[name] = out
    rows["logprobs"].requires_grad_()
    return rows
