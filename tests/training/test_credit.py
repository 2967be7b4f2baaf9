"""From rewards of episodes to advantages of tokens: KL in the reward, critics, whitening, what is left out."""

import math

import numpy as np
import pytest
import torch

from forge.actors.staleness import Staleness
from forge.data.packing import pack
from forge.losses import (
    Correction,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PPOLoss,
    ReinforceLoss,
    ReinforcePlusPlusLoss,
    RLOOLoss,
    SAPOLoss,
    gae,
)
from forge.training import credit
from forge.types import Batch, Completion, Episode, Group, Turn


def episode(length: int, reward: float | None, seed: int = 0) -> Episode:
    random = np.random.default_rng(seed)
    return Episode(
        prompt_ids=[1, 2],
        response_ids=list(range(length)),
        logprobs=random.uniform(-3, -1, length).tolist(),
        versions=[0] * length,
        reward=reward,
    )


def batch(lengths: list[int], rewards: list[float], algorithm) -> Batch:
    """One group, packed, with a reference and a critic."""
    group = Group([episode(n, r, i) for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))], index=0)
    packed = pack(credit.learnable_episodes([group], algorithm))
    random = np.random.default_rng(9)
    packed.ref_logprobs = (packed.logprobs + random.normal(0, 0.3, len(packed.tokens))).astype(np.float32)
    packed.values = random.normal(0, 1, len(packed.tokens)).astype(np.float32)
    return packed


def rows(packed: Batch, name: str) -> list[np.ndarray]:
    """The trained tokens' values by sequence."""
    cuts = np.cumsum(packed.lengths)[:-1]
    parts = zip(np.split(getattr(packed, name), cuts), np.split(packed.mask, cuts), strict=True)
    return [values[own] for values, own in parts]


def test_kl_in_reward_subtracts_remaining_sequence_kl():
    algorithm = GRPOLoss(beta=0.5, kl="k1", kl_in="reward")
    packed = batch([2, 3], [1.0, 0.0], algorithm)
    before = [values.copy() for values in rows(packed, "advantages")]
    credit.assign_credit(packed, algorithm)
    for old, new, logp, ref in zip(
        before, rows(packed, "advantages"), rows(packed, "logprobs"), rows(packed, "ref_logprobs"), strict=True
    ):
        to_come = [0.5 * (logp[t:] - ref[t:]).sum() for t in range(len(logp))]
        assert new.tolist() == pytest.approx((old - to_come).tolist(), abs=1e-5)


def test_reinforce_plus_plus_whitens_over_all_tokens():
    algorithm = ReinforcePlusPlusLoss(beta=0.1)
    packed = batch([2, 5], [1.0, 0.0], algorithm)
    credit.assign_credit(packed, algorithm)
    own = packed.advantages[packed.mask]
    assert (own.mean(), own.std(ddof=1)) == (pytest.approx(0.0, abs=1e-6), pytest.approx(1.0, rel=1e-4))


def test_critic_advantages_are_whitened_gae():
    algorithm = PPOLoss(beta=0.2, discount=0.9, trace=0.8)
    packed = batch([4, 2], [1.0, -1.0], algorithm)
    credit.assign_credit(packed, algorithm)
    found, kept = rows(packed, "advantages"), rows(packed, "returns")
    wide = []
    for logp, ref, values, reward, returns in zip(
        rows(packed, "logprobs"), rows(packed, "ref_logprobs"), rows(packed, "values"), [1.0, -1.0], kept, strict=True
    ):
        rewards = -0.2 * (logp - ref)
        rewards[-1] += reward
        one = [torch.from_numpy(x)[None] for x in (rewards, values, np.ones_like(values))]
        advantages, expected = gae(*one, discount=0.9, trace=0.8)
        assert returns.tolist() == pytest.approx(expected[0].tolist(), abs=1e-5)
        wide += advantages[0].tolist()
    wanted = (np.array(wide) - np.mean(wide)) / np.std(wide, ddof=1)
    assert np.concatenate(found).tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
    assert not packed.returns[~packed.mask].any()


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        (PPOLoss(), "rewards"),
        (PPOLoss(), "values"),
        (GRPOLoss(beta=0.1, kl_in="reward"), "ref_logprobs"),
        (GRPOLoss(beta=0.1, kl_in="reward"), "logprobs"),
    ],
)
def test_missing_credit_assignment_input_error_names_input(algorithm, name: str):
    packed = batch([2, 2], [1.0, 0.0], algorithm)
    if name == "logprobs":
        packed.logprobs[packed.mask] = math.nan
    else:
        setattr(packed, name, None)
    with pytest.raises(ValueError, match=f"(PPO|GRPO) needs {name} of every trained token"):
        credit.assign_credit(packed, algorithm)


def groups() -> list[Group]:
    return [
        Group([episode(2, 1.0), episode(3, 0.0)], index=2),
        Group([episode(1, 1.0), episode(4, 1.0)], index=1),
        Group([episode(2, 0.0), episode(2, 0.5)], index=0),
    ]


LOSSES = [
    GRPOLoss(),
    GRPOLoss(clip_high=0.3, correction=Correction()),
    DrGRPOLoss(),
    GSPOLoss(),
    SAPOLoss(),
    RLOOLoss(),
]


@pytest.mark.parametrize("algorithm", LOSSES, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_horizon"])
def test_skipping_zero_advantage_sequences_keeps_gradient(algorithm, aggregation):
    """The same loss and gradient with and without the sequences whose advantage is 0."""
    episodes = credit.learnable_episodes(groups(), algorithm)
    whole = pack(episodes, aggregation=aggregation, horizon=8 if aggregation == "fixed_horizon" else None)
    less = credit.skip_idle(whole, algorithm)
    assert (len(whole), len(less)) == (6, 4)
    gradients = []
    for packed in (whole, less):
        own = packed.mask
        logprobs = torch.from_numpy(packed.logprobs[own] + 0.1).requires_grad_()
        numbers = np.repeat(np.arange(len(packed)), packed.lengths)[own]
        behaviour, advantages, weights, sequences = (
            torch.from_numpy(x) for x in (packed.logprobs[own], packed.advantages[own], packed.weights[own], numbers)
        )
        loss = algorithm(logprobs, behaviour, advantages, weights, sequences=sequences)
        gradient = torch.autograd.grad(loss, logprobs)[0]
        gradients.append((loss.item(), gradient[advantages != 0].tolist(), gradient.abs().sum().item()))
    assert gradients[0][0] == pytest.approx(gradients[1][0], abs=1e-7)
    assert gradients[0][1] == gradients[1][1]
    assert gradients[0][2] == pytest.approx(gradients[1][2], rel=1e-5)


def test_batch_mean_baselines_are_subtracted_across_groups():
    mean = (1 + 0 + 1 + 1 + 0 + 0.5) / 6
    found = credit.learnable_episodes(groups(), ReinforceLoss())
    assert [e.advantage for e in found] == pytest.approx([r - mean for r in (0.0, 0.5, 1.0, 1.0, 1.0, 0.0)])
    baseline = credit.learnable_episodes(groups(), ReinforcePlusPlusLoss(group_baseline=True))
    assert [e.advantage for e in baseline] == pytest.approx([-0.25, 0.25, 0.0, 0.0, 0.5, -0.5])


def turns(rewards: list[float], final: float, *, lengths: tuple[int, ...] = (2, 3), branches=()) -> Episode:
    """An episode of turns of these lengths with two tokens of the environment before each."""
    tokens, mask, made = [], [], []
    for length, reward in zip(lengths, rewards, strict=True):
        start = len(tokens) + 2
        made.append(Turn(start, start + length, 0, "stop", reward))
        tokens += range(2 + length)
        mask += [False, False] + [True] * length
    logprobs, versions = [-1.0 if own else 0.0 for own in mask], [0 if own else -1 for own in mask]
    played = Episode.played(tokens, mask, logprobs, versions, turns=made, reward=sum(rewards) + final)
    played.branches = tuple(branches)
    return played


def test_gae_places_turn_rewards_on_turn_end_tokens():
    algorithm = PPOLoss(discount=0.9, trace=0.8)
    packed = pack(credit.learnable_episodes([Group([turns([0.5, -1.0], 2.0), turns([0.0, 0.0], 1.0)], 0)], algorithm))
    values = np.linspace(-1, 1, len(packed.tokens)).astype(np.float32)
    packed.values = values.copy()
    credit.assign_credit(packed, algorithm)
    earned = [[0, 0.5, 0, 0, 1.0], [0, 0, 0, 0, 1.0]]  # the end of an episode is the end of its last turn too
    for number, rewards in enumerate(earned):
        own = [9 * number + t for t in (2, 3, 6, 7, 8)]
        assert [packed.rewards[t] for t in own] == rewards
        advantage = following = 0.0
        for t, reward in zip(reversed(own), reversed(rewards), strict=True):
            advantage = reward + 0.9 * following - values[t] + 0.9 * 0.8 * advantage
            following = values[t]
            assert packed.returns[t] == pytest.approx(advantage + values[t], abs=1e-5)
    assert not packed.returns[~packed.mask].any()
    assert not packed.advantages[~packed.mask].any()


def test_group_advantages_use_total_reward_of_multi_turn_episodes():
    algorithm = RLOOLoss()
    packed = pack(credit.learnable_episodes([Group([turns([0.5, -1.0], 2.0), turns([0.0, 0.0], 0.5)], 0)], algorithm))
    first, second = rows(packed, "advantages")
    assert first.tolist() == [1.0] * 5
    assert second.tolist() == [-1.0] * 5
    assert packed.advantages[~packed.mask].tolist() == [0.0] * 8


def test_branches_of_episode_share_advantage_of_total_reward():
    # The first branch earned 0.5 and saw 1.0 still to come.
    earlier = turns([0.5, 0.0], 1.0)
    both = turns([0.0, 0.0], 1.0, branches=[earlier])
    assert both.outcome == 1.5
    group = Group([both, turns([0.0, 0.0], 0.0)], 0)
    assert group.rewards == [1.5, 0.0]
    learnt = credit.learnable_episodes([group], RLOOLoss())
    assert [episode.advantage for episode in learnt] == [1.5, 1.5, -1.5]
    assert learnt[0] is earlier
    assert len(pack(learnt)) == 3


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [
        ([[3], [-1]], 3),
        ([[-1], [-1]], -1),
        ([[-1, 7], [9]], 7),
        ([[-1], [0]], 0),
        ([[5, -1, 4], [-1, -1], [6]], 4),
    ],
)
def test_group_policy_version_is_oldest_known_token_version(versions: list[list[int]], oldest: int):
    samples = [Episode(prompt_ids=[1], response_ids=[2] * len(v), reward=1.0, versions=v) for v in versions]
    assert Group(samples, 0).version == oldest
    assert Completion(token_ids=[2] * len(versions[0]), versions=versions[0]).version == samples[0].version
    assert Staleness(0).fresh(Group(samples, 0), oldest + 1) == (oldest == -1)
    whole, *earlier = samples
    whole.branches = tuple(earlier)
    assert whole.version == oldest


def test_episode_with_token_arrays_of_unequal_length_raises():
    for tokens, mask, logprobs, versions, made, problem in (
        ([1, 2], [False, True], [0.0, -1.0], [-1], [Turn(1, 2, 0, "stop")], "one length"),
        ([1, 2], [False, True], [0.0, -1.0], [-1, -1], [Turn(1, 2, 0, "stop")], "versions must be at least 0"),
        ([1, 2], [False, True], [-1.0, -1.0], [-1, 0], [Turn(1, 2, 0, "stop")], "logprobs must be 0"),
        ([1, 2], [False, True], [0.0, -1.0], [-1, 0], [], "turns must cover"),
        ([1, 2], [False, False], [0.0, 0.0], [-1, -1], [], "needs at least one turn"),
    ):
        with pytest.raises(ValueError, match=problem):
            Episode.played(tokens, mask, logprobs, versions, turns=made, reward=1.0)
