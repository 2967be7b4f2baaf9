"""The trainer as an actor: what a step makes of groups and episodes."""

import torch

from forge.actors import Trainer
from forge.algorithms import GRPO
from forge.types import Completion, Episode, Group
from tests.actors.respawn import started

REWARDS = [0.0, 1.0, 1.0, 0.25]


def step_weights(model: str, items: list) -> tuple[float, dict[str, torch.Tensor]]:
    trainer = started(Trainer(model, loss=GRPO(), optimizer={"learning_rate": 1e-3}, seq_len=64))
    metrics = trainer.train_step(items)
    return metrics["train/grad_norm"], {n: t.clone() for n, t in trainer.trainer.weights().items()}


def test_trainer_actor_uses_group_advantages_of_algorithm(model: str) -> None:
    completions = [Completion("", [5 + n, 6, 1], [-3.0] * 3, prompt_ids=[4, 5]) for n in range(4)]
    episodes = [Episode(completion, reward) for completion, reward in zip(completions, REWARDS, strict=True)]
    (advantages,) = GRPO().advantages([REWARDS])
    given = [
        Episode(completion, reward, advantage=float(advantage))
        for completion, reward, advantage in zip(completions, REWARDS, advantages, strict=True)
    ]
    grad_norm, weights = step_weights(model, [Group(episodes)])
    expected_norm, expected = step_weights(model, given)
    assert grad_norm > 0
    assert grad_norm == expected_norm
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
