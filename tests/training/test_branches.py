"""Branches share their episode's weight: what a conversation's rewriting splits trains as what it leaves whole."""

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from forge.actors import Trainer
from forge.algorithms import ALGORITHMS, Algorithm, ValueLoss, load_algorithm
from forge.algorithms.base import Aggregation
from forge.data.packing import pack
from forge.losses import Correction, GRPOLoss, GSPOLoss, RLOOLoss
from forge.training import credit
from forge.training.policy import Policy, TokenScores, TokenValues
from forge.training.step import call_by_name, loss_inputs, mini_batches
from forge.types import Batch, Episode, Group, Turn
from tests.training.cases import VOCAB, tiny_model, write_model

AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "fixed_horizon")
# Losses of which no term is taken over a sequence, by their settings.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in ALGORITHMS if name not in ("gspo", "rloo")
} | {
    "grpo with KL": ("grpo", {"beta": 0.1, "kl": "k2"}),
    "grpo with KL in the reward": ("grpo", {"beta": 0.1, "kl": "k1", "kl_in": "reward"}),
    "grpo with entropy and a masked correction": ("grpo", {"entropy_coef": 0.01, "correction": Correction("mask")}),
    "reinforce++ with KL": ("reinforce++", {"beta": 0.2}),
    "ppo with KL": ("ppo", {"beta": 0.2, "discount": 0.9, "trace": 0.7}),
}


def numbers(name: str, count: int, low: float, high: float) -> np.ndarray:
    """Of the token that a conversation has at each place, whatever branch it is in."""
    return np.random.default_rng(sum(map(ord, name)) + count).uniform(low, high, count).astype(np.float32)


def conversation(turns: list[int], splits: set[int], seed: int, rewards: bool = True, weight: float = 1.0) -> Episode:
    """Turns of these lengths, each after two tokens of the environment, and a new branch after each turn in `splits`.

    The context of a branch is all that came before, as if it had been rewritten to what it was.
    """
    random = np.random.default_rng(seed)
    total = sum(turns) + 2 * len(turns)
    tokens = random.integers(3, VOCAB, total).tolist()
    logprobs = random.uniform(-3, -1, total).tolist()
    earned = random.uniform(-1, 1, len(turns)).tolist() if rewards else [0.0] * len(turns)
    final = float(random.uniform(-1, 1))
    branches: list[list[Turn]] = [[]]
    place = 0
    for number, length in enumerate(turns):
        branches[-1].append(Turn(place + 2, place + 2 + length, 0, "stop", earned[number]))
        place += 2 + length
        if number in splits and number < len(turns) - 1:
            branches.append([])
    to_come = sum(earned) + final
    played: list[Episode] = []
    for branch in branches:
        end = branch[-1].end
        own = [any(turn.start <= place < turn.end for turn in branch) for place in range(end)]
        played.append(
            Episode.played(
                tokens[:end],
                own,
                [logprob if trained else 0.0 for logprob, trained in zip(logprobs, own, strict=False)],
                [0 if trained else -1 for trained in own],
                turns=branch,
                reward=to_come,
            )
        )
        to_come -= sum(turn.reward for turn in branch)
    *earlier, last = played
    last.branches, last.weight = tuple(earlier), weight
    return last


Shape = list[tuple[list[int], set[int]]]


def groups_of(shape: Shape, split: bool) -> list[Group]:
    """Two conversations a group; the last one is only if their number is odd."""
    episodes = [
        conversation(turns, splits if split else set(), seed, weight=1.0 + seed % 3)
        for seed, (turns, splits) in enumerate(shape)
    ]
    return [Group(episodes[i : i + 2], index=i) for i in range(0, len(episodes), 2)]


def batch_of(shape: Shape, split: bool, algorithm: Algorithm, aggregation: Aggregation) -> Batch:
    horizon = 7 if aggregation == "fixed_horizon" else None
    batch = credit.make_batch(groups_of(shape, split), algorithm, 0, aggregation=aggregation, horizon=horizon)
    own, count = batch.mask, int(batch.mask.sum())
    for name, low, high in (("ref_logprobs", -3.0, -1.0), ("values", -1.0, 1.0)):
        values = np.zeros(len(own), np.float32)
        values[own] = numbers(name, count, low, high)
        setattr(batch, name, values)
    credit.assign_credit(batch, algorithm)
    return batch


def gradient(batch: Batch, loss: Any, drift: float = 0.4) -> np.ndarray:
    """Of each trained token's log-probability and entropy, or value, in the order in which they were written."""
    count = int(batch.mask.sum())
    logprobs = torch.from_numpy(batch.logprobs[batch.mask] + drift * numbers("policy", count, -1, 1)).double()
    scores = TokenScores(logprobs.requires_grad_(), torch.from_numpy(numbers("entropy", count, 0, 2)).double())
    output: TokenScores | TokenValues = scores
    if isinstance(loss, ValueLoss):
        output = TokenValues(torch.from_numpy(numbers("value", count, -1, 1)).double().requires_grad_())
    inputs = {
        name: values.double() if values is not None and values.is_floating_point() else values
        for name, values in loss_inputs(batch, output).items()
    }
    return torch.autograd.grad(call_by_name(loss, inputs), output[0])[0].numpy()


shapes = st.lists(
    st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sets(st.integers(0, 4))), min_size=2, max_size=6
).filter(lambda shape: len(shape) % 2 == 0)


@given(st.sampled_from(AGGREGATIONS), shapes)
@pytest.mark.parametrize("name", LOSSES)
def test_splitting_episode_into_branches_does_not_change_gradient(
    name: str, aggregation: Aggregation, shape: Shape
) -> None:
    algorithm = load_algorithm(LOSSES[name][0], **LOSSES[name][1])
    whole, split = (batch_of(shape, split, algorithm, aggregation) for split in (False, True))
    assert len(split) >= len(whole)
    np.testing.assert_allclose(gradient(split, algorithm), gradient(whole, algorithm), rtol=0, atol=1e-10)
    if algorithm.needs_critic:
        critic = ValueLoss()
        np.testing.assert_allclose(gradient(split, critic), gradient(whole, critic), rtol=0, atol=1e-10)


@given(shapes)
@pytest.mark.parametrize(
    "algorithm",
    [GSPOLoss(), RLOOLoss(), RLOOLoss(beta=0.1, entropy_coef=0.1), GRPOLoss(correction=Correction(level="sequence"))],
    ids=["gspo", "rloo", "rloo with KL", "a sequence's correction"],
)
def test_on_policy_sequence_ratios_are_1_for_any_micro_batch_split(algorithm: Algorithm, shape: Shape) -> None:
    batches = (batch_of(shape, split, algorithm, "sequence_mean") for split in (False, True))
    whole, split = (gradient(batch, algorithm, drift=0.0) for batch in batches)
    np.testing.assert_allclose(split, whole, rtol=1e-6, atol=1e-9)  # shares of branches are float32


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_branched_episode_gives_same_gradient_for_every_weight(aggregation: Aggregation) -> None:
    shape: Shape = [([3, 5, 2], {0, 1}), ([4], set()), ([1, 1, 6, 2], {2}), ([2, 2], {0})]
    plain = tiny_model("qwen3").double()
    for module in plain.modules():
        if type(module).__name__.endswith("RMSNorm"):  # transformers' computes in float32
            module.forward = partial(F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=1e-6)
    gradients = []
    for split in (False, True):
        policy = Policy(plain)
        policy.zero_grad()
        batch = batch_of(shape, split, GRPOLoss(), aggregation)
        inputs = loss_inputs(batch, policy(batch))
        call_by_name(GRPOLoss(), {n: v.double() if n == "weights" else v for n, v in inputs.items()}).backward()
        gradients.append({name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=0, atol=1e-10, msg=name)


class Witness:
    """A loss under `sequence_mean` that keeps what it was given."""

    aggregation = "sequence_mean"
    seen: ClassVar[list[dict[str, torch.Tensor]]] = []

    def __call__(self, logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.seen.append({"advantages": advantages, "weights": weights})
        return -(weights * advantages * logprobs).sum()


def shares(batch: Batch) -> list[float]:
    return [float(part.sum()) for part in np.split(batch.weights, np.cumsum(batch.lengths)[:-1])]


def test_branches_of_one_episode_share_a_mini_batch() -> None:
    group = Group([conversation([2, 3, 1], {0, 1}, seed) for seed in range(5)], 0)
    batch = pack(credit.learnable_episodes([group], RLOOLoss()), aggregation="sequence_mean")
    parts = list(mini_batches(batch, 3, (0,)))
    assert sorted(len(part) for part in parts) == [3, 6, 6]
    assert all(part.weights.sum() == pytest.approx(1.0) for part in parts)
    for part in parts:
        assert np.bincount(part.episodes)[np.unique(part.episodes)].tolist() == [3] * (len(part) // 3)


def test_trainer_weighs_tokens_of_all_branches_equally(tmp_path: Path) -> None:
    groups = [Group([conversation([2, 3], {0}, 2 * i), conversation([4, 1], {0}, 2 * i + 1)], i) for i in range(2)]
    trainer = Trainer(str(write_model(tmp_path)), loss=Witness(), optimizer={"learning_rate": 0.0}, seq_len=64)
    trainer.setup()
    try:
        metrics = trainer.train_step(groups)
    finally:
        trainer.teardown()
    assert metrics["train/tokens"] == sum(
        len(e.tokens) for g in groups for whole in g.episodes for e in (*whole.branches, whole)
    )
    (seen,) = Witness.seen
    assert sorted(seen["weights"].tolist()) == pytest.approx([1 / 20] * 20)
    outcomes = np.repeat([reward for group in groups for reward in group.rewards], 5)
    assert sorted(seen["advantages"].tolist()) == pytest.approx(sorted(outcomes))


def test_episode_reward_is_counted_once_for_all_branches() -> None:
    whole, split = (conversation([2, 3, 4], splits, 5) for splits in (set[int](), {0, 1}))
    whole.advantage = split.advantage = 0.0
    first, second = pack([whole]), pack([split])
    assert first.rewards is not None
    assert second.rewards is not None
    assert second.rewards[second.mask] == pytest.approx(first.rewards[first.mask], abs=1e-6)
    assert second.rewards.sum() == pytest.approx(whole.reward, abs=1e-6)
