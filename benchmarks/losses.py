"""Our losses, advantages and estimators against TRL's and verl's, on the same random tensors in float64.

    python benchmarks/losses.py --peers-python PYTHON_WITH_TRL_AND_VERL

Runs `losses_peers.py` there (without the option: takes what it left in tests/algorithms/peers.json) and prints the
largest differences of loss and gradient, for docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.algorithms.advantages import group_relative, leave_one_out
from forge.algorithms.gae import whiten_values
from forge.algorithms.terms import kl, sequence_mean_weights, token_mean_weights, weighted_sum
from forge.losses import Correction, ReinforcePlusPlusLoss, ValueLoss, gae, load_algorithm

PEERS = Path(__file__).parents[1] / "tests" / "algorithms" / "peers.json"
HORIZON, GROUP = 16, 3


class Inputs:
    """What the peers were given, packed: only trained tokens, with the number of each one's sequence."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.all = {name: torch.tensor(x, dtype=torch.float64) for name, x in values.items()}
        self.mask = self.all["mask"].bool()
        self.sequences = self.mask.nonzero()[:, 0]
        self.rewards = self.all["rewards"].view(-1, GROUP).tolist()

    def __getitem__(self, name: str) -> Tensor:
        values = self.all[name]
        return values[self.sequences] if values.dim() == 1 else values[self.mask]

    def weights(self, aggregation: str) -> Tensor:
        if aggregation == "fixed_horizon":
            return torch.full_like(self["logprobs"], 1 / (len(self.mask) * HORIZON))
        means = {"token_mean": token_mean_weights, "sequence_mean": sequence_mean_weights}
        mask = self.mask.double()
        # The functions answer in float32, in which shares are rounded.
        exact = mask / mask.sum() if aggregation == "token_mean" else mask / mask.sum(-1, keepdim=True) / len(mask)
        torch.testing.assert_close(means[aggregation](mask).double(), exact, rtol=1e-6, atol=1e-9)
        return exact[self.mask]

    def spread(self, values: Tensor) -> Tensor:
        """Packed values back at their places, 0 elsewhere."""
        return torch.zeros_like(self.all["logprobs"]).masked_scatter(self.mask, values)


def policy(x: Inputs, name: str, aggregation: str | None = None, corrected: bool = False, **settings: Any) -> Any:
    """Loss and gradient of one of our algorithms. With a correction the peers' old policy is our proximal one."""
    algorithm = load_algorithm(name, **settings)
    old = {"behaviour_logprobs": x["behaviour"], "proximal_logprobs": x["old"]} if corrected else {}

    def loss(logprobs: Tensor) -> Tensor:
        given = {"logprobs": logprobs, "behaviour_logprobs": x["old"], "advantages": x["advantages"]} | old
        return algorithm(
            **given,
            weights=x.weights(aggregation or algorithm.aggregation),
            ref_logprobs=x["ref"],
            sequences=x.sequences,
        )

    return differentiated(x, "logprobs", loss)


def differentiated(x: Inputs, name: str, loss: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    values = x[name].clone().requires_grad_()
    value = loss(values)
    return {"loss": value.detach(), "gradient": x.spread(torch.autograd.grad(value, values)[0])}


def trl(x: Inputs) -> dict[str, Any]:
    return {
        "grpo": policy(x, "grpo", "sequence_mean", beta=0.1),
        "grpo two-sided": policy(x, "grpo", "sequence_mean", dual_clip=1.4),
        "dapo": policy(x, "dapo", dual_clip=None),
        "dr_grpo": policy(x, "dr_grpo"),
        "gspo": policy(x, "gspo", clip_low=0.05, clip_high=0.1),
        "cispo": policy(x, "cispo", clip_high=0.3),
        "sapo": policy(x, "sapo"),
        "rloo": policy(x, "rloo", clip_low=0.3, clip_high=0.5),
    }


def verl(x: Inputs) -> dict[str, Any]:
    wide = {"clip_low": 0.1, "clip_high": 0.3}
    mean = x.weights("token_mean")
    advantages, returns = gae(x.all["token_rewards"], x.all["values"], x.mask, discount=0.9, trace=0.8)

    def per_episode(values: list[list[float]]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).flatten()[x.sequences]

    def plus_plus(group_baseline: bool) -> Tensor:
        return whiten_values(per_episode(ReinforcePlusPlusLoss(group_baseline=group_baseline).advantages(x.rewards)))

    def divergence(estimator: Any) -> dict[str, Any]:
        return differentiated(x, "logprobs", lambda logprobs: weighted_sum(kl(logprobs, x["ref"], estimator), mean))

    estimates = {
        "advantages grpo": per_episode([group_relative(r, epsilon=1e-6) for r in x.rewards]),
        "advantages dr_grpo": per_episode([group_relative(r, normalize=False) for r in x.rewards]),
        "advantages rloo": per_episode([leave_one_out(r) for r in x.rewards]),
        "advantages reinforce++": plus_plus(False),
        "advantages reinforce++ baseline": plus_plus(True),
    }
    return {
        "ppo": policy(x, "ppo", **wide),
        "dapo": policy(x, "dapo", dual_clip=1.4),
        "grpo": policy(x, "grpo", "sequence_mean"),
        "dr_grpo": policy(x, "dr_grpo"),
        "gspo": policy(x, "gspo", clip_low=0.05, clip_high=0.1),
        "cispo": policy(x, "cispo", clip_low=0.4, clip_high=0.3),
        "sapo": policy(x, "sapo"),
        "token truncated": policy(x, "grpo", corrected=True, correction=Correction("truncate", high=1.5), **wide),
        "sequence truncated": policy(
            x, "grpo", corrected=True, correction=Correction("truncate", "sequence", high=1.5), **wide
        ),
        **{name: divergence(name) for name in ("k1", "k2", "k3")},
        "gae": {"values": x.spread(whiten_values(advantages[x.mask])), "returns": returns},
        "value": differentiated(x, "values", lambda v: ValueLoss(0.2)(v, x["old_values"], x["returns"], mean)),
        **{name: {"values": x.spread(values)} for name, values in estimates.items()},
    }


def differences(peers: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """By library and case, the largest difference of each result."""
    x = Inputs(peers["inputs"])
    found = {}
    for library, ours in (("trl", trl(x)), ("verl", verl(x))):
        if ours.keys() != peers[library].keys():
            raise ValueError(f"cases of {library} differ: {sorted(ours.keys() ^ peers[library].keys())}")
        for case, results in ours.items():
            theirs = peers[library][case]
            found[library, case] = {
                what: (value - torch.tensor(theirs[what], dtype=torch.float64)).abs().max().item()
                for what, value in results.items()
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", help="interpreter of an environment with TRL and verl")
    args = parser.parse_args()
    if args.peers_python:
        subprocess.run([args.peers_python, str(Path(__file__).with_name("losses_peers.py")), str(PEERS)], check=True)
    peers = json.loads(PEERS.read_text())
    print(", ".join(f"{name} {number}" for name, number in peers["versions"].items()))
    print("| library | case | loss or values | gradient or returns |\n|---|---|---|---|")
    for (library, case), results in differences(peers).items():
        print(f"| {library} | {case} | " + " | ".join(f"{value:.0e}" for value in results.values()) + " |")


if __name__ == "__main__":
    main()
