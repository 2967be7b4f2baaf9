"""What TRL and verl compute for given log-probabilities, by their own code. Run in an environment that has both.

    python benchmarks/losses_peers.py tests/algorithms/peers.json

Writes random inputs (float64, fixed seed), and for each case its loss and the gradient by the log-probabilities, or the
values of an estimator. `benchmarks/losses.py` and `tests/algorithms/test_peers.py` compare ours with it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHAPE, HORIZON, GROUP = (6, 8), 16, 3
LENGTHS = [8, 3, 5, 1, 7, 4]


def inputs() -> dict[str, Tensor]:
    """[sequences, width] each, but for the advantages and rewards of sequences."""
    random = torch.Generator().manual_seed(0)

    def draw(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(SHAPE, generator=random, dtype=torch.float64)

    logprobs = -2 + draw()
    return {
        "logprobs": logprobs,
        "old": logprobs + draw(0.3),
        "behaviour": logprobs + draw(0.5),
        "ref": logprobs + draw(0.3),
        "mask": (torch.arange(SHAPE[1]) < torch.tensor(LENGTHS)[:, None]).double(),
        "values": draw(),
        "old_values": draw(),
        "returns": draw(),
        "token_rewards": draw(),
        "advantages": draw()[:, 0],
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 1.0], dtype=torch.float64),
    }


def differentiated(x: dict[str, Tensor], loss: Any) -> dict[str, Any]:
    logprobs = x["logprobs"].clone().requires_grad_()
    value = loss(logprobs)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {"loss": value.item(), "gradient": (gradient * x["mask"]).tolist()}


def trl(x: dict[str, Tensor]) -> dict[str, Any]:
    from trl import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    def run(trainer: Any, **settings: Any) -> dict[str, Any]:
        """The trainer's loss with a model whose log-probabilities are those given."""
        own: dict[str, Any] = {
            **{"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "delta": None},
            **{"importance_sampling_level": "token", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
            **settings,
        }
        same = {"gather": lambda t: t, "gather_for_metrics": lambda t: t, "reduce": lambda t, reduction: t}

        def loss(logprobs: Tensor) -> Tensor:
            state = SimpleNamespace(
                **{name: own[name] for name in ("loss_type", "epsilon_low", "epsilon_high", "beta")},
                importance_sampling_level=own["importance_sampling_level"],
                args=SimpleNamespace(
                    delta=own["delta"],
                    use_bias_correction_kl=False,
                    sapo_temperature_pos=own["sapo_temperature_pos"],
                    sapo_temperature_neg=own["sapo_temperature_neg"],
                ),
                aux_loss_enabled=False,
                top_entropy_quantile=1.0,
                off_policy_mask_threshold=None,
                use_vllm=False,
                _entropy_bonus_enabled=False,
                max_completion_length=HORIZON,
                accelerator=SimpleNamespace(num_processes=1, **same),
                model=SimpleNamespace(training=False),
                _metrics=defaultdict(lambda: defaultdict(list)),
                _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
            )
            empty = torch.zeros(SHAPE[0], 0)
            batch = {
                **{
                    "prompt_ids": empty,
                    "prompt_mask": empty,
                    "completion_ids": x["mask"],
                    "completion_mask": x["mask"],
                },
                **{"advantages": x["advantages"], "old_per_token_logps": x["old"], "ref_per_token_logps": x["ref"]},
                **{"old_logps": (x["old"] * x["mask"]).sum(1), "num_items_in_batch": x["mask"].sum()},
            }
            return trainer._compute_loss(state, None, batch)

        return differentiated(x, loss)

    return {
        "grpo": run(GRPOTrainer, beta=0.1),
        "grpo two-sided": run(GRPOTrainer, delta=1.4),
        "dapo": run(GRPOTrainer, loss_type="dapo", epsilon_high=0.28),
        "dr_grpo": run(GRPOTrainer, loss_type="dr_grpo"),
        "gspo": run(GRPOTrainer, importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.1),
        "cispo": run(GRPOTrainer, loss_type="cispo", epsilon_high=1.3),
        "sapo": run(GRPOTrainer, loss_type="sapo"),
        "rloo": run(RLOOTrainer, epsilon_low=0.3, epsilon_high=0.5),
    }


def verl(x: dict[str, Tensor]) -> dict[str, Any]:
    from verl.trainer.ppo import core_algos as algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig

    mask, groups = x["mask"], np.repeat(np.arange(SHAPE[0] // GROUP), GROUP)
    advantages = x["advantages"][:, None].expand(SHAPE)
    outcome = torch.zeros(SHAPE, dtype=torch.float64)
    outcome[torch.arange(SHAPE[0]), torch.tensor(LENGTHS) - 1] = x["rewards"]

    def run(name: str, mode: str, weights: Tensor | None = None, **settings: Any) -> dict[str, Any]:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            loss_scale_factor=HORIZON,
            global_batch_info={"loss_scale_factor": HORIZON},
            **settings,
        )
        function = algos.get_policy_loss_fn(name)

        def loss(logprobs: Tensor) -> Tensor:
            return function(x["old"], logprobs, advantages, mask, mode, config, weights)[0]

        return differentiated(x, loss)

    def kl(kind: str) -> dict[str, Any]:
        def loss(logprobs: Tensor) -> Tensor:
            return algos.agg_loss(algos.kl_penalty(logprobs, x["ref"], kind), mask, "token-mean")

        return differentiated(x, loss)

    def critic(values: Tensor) -> Tensor:
        return algos.compute_value_loss(values, x["returns"], x["old_values"], mask, 0.2)[0]

    def weights(level: str, bound: float) -> Tensor:
        return compute_rollout_correction_weights(x["old"] - x["behaviour"], mask, level, bound)[0]

    gae = algos.compute_gae_advantage_return(x["token_rewards"], x["values"], mask, 0.9, 0.8)
    wide = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    no_dual = {"clip_ratio_c": 1e9}
    gamma = SimpleNamespace(gamma=1.0)
    found: dict[str, Any] = {
        "ppo": run("vanilla", "token-mean", **wide, **no_dual),
        "dapo": run("vanilla", "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.4),
        "grpo": run("vanilla", "seq-mean-token-mean", **no_dual),
        "dr_grpo": run("vanilla", "seq-mean-token-sum-norm", **no_dual),
        "gspo": run("gspo", "seq-mean-token-mean", clip_ratio_low=0.05, clip_ratio_high=0.1),
        "cispo": run("cispo", "token-mean", clip_ratio_low=0.4, clip_ratio_high=0.3),
        "sapo": run("sapo", "seq-mean-token-mean"),
        "token truncated": run("vanilla", "token-mean", weights("token", 1.5), **wide, **no_dual),
        "sequence truncated": run("vanilla", "token-mean", weights("sequence", 1.5), **wide, **no_dual),
        **{kind: kl(kind) for kind in ("k1", "k2", "k3")},
        "gae": {"values": (gae[0] * mask).tolist(), "returns": (gae[1] * mask).tolist()},
    }
    values = x["values"].clone().requires_grad_()
    loss = critic(values)
    found["value"] = {"loss": loss.item(), "gradient": torch.autograd.grad(loss, values)[0].tolist()}
    for name, estimate in {
        "advantages grpo": algos.compute_grpo_outcome_advantage(outcome, mask, groups),
        "advantages dr_grpo": algos.compute_grpo_outcome_advantage(
            outcome, mask, groups, norm_adv_by_std_in_grpo=False
        ),
        "advantages rloo": algos.compute_rloo_outcome_advantage(outcome, mask, groups),
        "advantages reinforce++": algos.compute_reinforce_plus_plus_outcome_advantage(outcome, mask, gamma),
        "advantages reinforce++ baseline": algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            outcome, mask, groups
        ),
    }.items():
        found[name] = {"values": (estimate[0] * mask).tolist()}
    return found


def main() -> None:
    x = inputs()
    found = {
        "versions": {name: version(name) for name in ("trl", "verl", "torch")},
        "inputs": {name: values.tolist() for name, values in x.items()},
        "trl": trl(x),
        "verl": verl(x),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
