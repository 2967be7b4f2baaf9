"""Credit assignment: from the rewards of episodes to a batch with an advantage for every token.

rewards [groups][samples]  --algorithm.advantages-->  one number per episode  --pack-->  Batch
Batch + reference, critic  --assign-->  one number per token
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..algorithms import Algorithm
from ..algorithms.gae import ROUNDING, gae, pack_sequences, pad_sequences, whiten_values
from ..algorithms.terms import kl
from ..data.packing import pack
from ..observability import Reduce, phase, record_metric, record_values
from ..types import Batch, Episode, Group


@phase("rollout_metrics")
def record_rollouts(episodes: Iterable[Episode]) -> None:
    """Record metrics of the sampled episodes that a step trains on: reward, accuracy, lengths, and the turns and calls
    of dialogues.

    They are recorded at training and not at sampling, which runs ahead of it and also samples for evaluation.
    """
    values_by_name: defaultdict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        info = episode.info
        scores = {"reward": episode.outcome, "accuracy": info.get("correct")}
        for name, score in ((info.get("parts") or {}) | (info.get("extras") or {})).items():
            scores[f"reward/{name}"] = score
        for name, value in scores.items():
            if value is not None:
                values_by_name[name].append(value)

        # Lengths are turns'; an episode of a single turn lists no turns.
        branches = (*episode.branches, episode)
        turns = [(turn.end - turn.start, turn.finish) for branch in branches for turn in branch.turns]
        for length, finish in turns or [(sum(episode.mask), info.get("finish", ""))]:
            values_by_name["generation/completion_length"].append(length)
            values_by_name["generation/truncated"].append(finish == "length")

        # Metrics of dialogues only.
        if episode.turns:
            values_by_name["episode/tokens"].append(sum(len(branch.tokens) for branch in branches))
            for name in ("turns", "calls", "unread_calls"):
                values_by_name[f"episode/{name}"].append(info[name])
            for stop in ("terminated", "truncated", "max_turns", "max_tokens"):
                values_by_name[f"episode/{stop}"].append(stop in (info["stop"], *info.get("limits", ())))

    for name, metric_values in values_by_name.items():
        record_values(name, metric_values)
    record_values("reward", values_by_name["reward"], Reduce.STD)
    record_metric("generation/tokens", sum(values_by_name["generation/completion_length"]), Reduce.SUM)


@phase("pack")
def make_batch(
    groups: Sequence[Group], algorithm: Algorithm, version: int, recorded: Sequence[Group] = (), **shares: Any
) -> Batch:
    """Return the groups as one batch, with the advantage of each episode, and record metrics of the groups.

    Sequences without gradient are left out, see `skip_idle`. The metrics are the age of the groups in versions, and
    the share of groups without signal.

    Args:
        version: the version of the weights that the batch trains.
        recorded: groups among these; the batch's `recorded` numbers their tokens.
        shares: `aggregation` and `horizon` of `forge.data.packing.pack`.
    """
    # Groups that were read from a file have version -1 and no age.
    versions = [group.version for group in groups]
    ages = [version - oldest for oldest in versions if oldest >= 0]
    record_values("policy_age", ages)
    record_values("policy_age", ages, Reduce.MAX)

    sequences = learnable_episodes(groups, algorithm)
    batch = pack(sequences, **shares)

    # Groups are numbered in the order of the data, as mini-batches are drawn by number: they arrive in another order in
    # each run.
    groups = sorted(groups, key=lambda group: group.index)
    group_numbers = {
        id(branch): index
        for index, group in enumerate(groups)
        for episode in group.episodes
        for branch in (*episode.branches, episode)
    }
    batch.groups = np.array([group_numbers[id(sequence)] for sequence in sequences])
    if recorded:
        recorded_ids = {id(group) for group in recorded}
        is_recorded = np.repeat([id(groups[index]) in recorded_ids for index in batch.groups], batch.lengths)
        # Recorded tokens are numbered in the order of the batch; others have -1.
        batch.recorded = np.where(is_recorded, np.cumsum(is_recorded) - 1, -1)

    trained = skip_idle(batch, algorithm)
    check_certificates(groups, int(batch.mask.sum()), int(trained.mask.sum()))
    return trained


def check_certificates(groups: Sequence[Group], packed_tokens: int, trained_tokens: int) -> None:
    """Check that each episode trains as many tokens as its certificate says; record the token counts of the batch.

    Args:
        packed_tokens: the number of tokens with mask True of all episodes.
        trained_tokens: the number of those that have a gradient.

    Raises:
        AssertionError: tokens of an episode were lost or doubled on the way.
    """
    episodes = [episode for group in groups for episode in group.episodes if "certificate" in episode.info]
    for episode in episodes:
        expected = episode.info["certificate"]["trained"]
        trained = sum(sum(branch.mask) for branch in (*episode.branches, episode))
        if trained != expected:
            raise AssertionError(f"an episode trains {trained} tokens, but its certificate says {expected}")

    if episodes:
        record_metric("certificate/batch", trained_tokens, Reduce.SUM)
        record_metric("certificate/idle", packed_tokens - trained_tokens, Reduce.SUM)


def learnable_episodes(groups: Sequence[Group], algorithm: Algorithm) -> list[Episode]:
    """Return the groups' sequences with their advantages, in the order of the data: each episode after its earlier
    branches.

    Raises:
        ValueError: an episode has another number of advantages than trained tokens, or one is not finite.
    """
    rewards = [group.rewards for group in groups]
    keywords = {}
    if "episodes" in inspect.signature(algorithm.advantages).parameters:
        keywords["episodes"] = [group.episodes for group in groups]

    for group, advantages in zip(groups, algorithm.advantages(rewards, **keywords), strict=True):
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            give_advantage(episode, advantage.tolist() if hasattr(advantage, "tolist") else advantage)

    if algorithm.within_group:
        record_metric("groups_without_signal", sum(not group.has_signal for group in groups) / len(groups))
    in_order = sorted(groups, key=lambda group: group.index)
    return [branch for group in in_order for episode in group.episodes for branch in (*episode.branches, episode)]


def give_advantage(episode: Episode, advantage: float | Sequence[float]) -> None:
    """Set the advantage of an episode and of its branches, in place.

    Args:
        advantage: one number for all of its tokens, or one for each trained token, first the branches' tokens.

    Raises:
        ValueError: there are not as many numbers as trained tokens, or one is not finite.
    """
    branches = (*episode.branches, episode)
    if not isinstance(advantage, Sequence):
        for branch in branches:
            branch.advantage = advantage
        return

    # In the order of the batch, where earlier branches come first.
    counts = [sum(branch.mask) for branch in branches]
    if len(advantage) != sum(counts):
        raise ValueError(f"advantages has {len(advantage)} numbers, but the episode has {sum(counts)} trained tokens")
    if not np.isfinite(advantage).all():
        raise ValueError("advantages must be finite numbers")

    for branch, end, count in zip(branches, np.cumsum(counts), counts, strict=True):
        branch.advantage = [float(value) for value in advantage[end - count : end]]


def skip_idle(batch: Batch, algorithm: Algorithm) -> Batch:
    """Return the batch without the sequences whose advantages are all 0, if the loss depends on advantages only.

    The other sequences keep their share of the loss. If all sequences are like that, the batch is returned unchanged.
    """
    has_other_terms = algorithm.needs_reference or algorithm.entropy_coef or algorithm.whiten
    is_sum_over_advantages = algorithm.within_group and algorithm.advantages_alone
    if has_other_terms or not is_sum_over_advantages:
        return batch

    first_tokens = np.cumsum(batch.lengths)[:-1]  # of each sequence but the first
    has_signal = np.array([values.any() for values in np.split(batch.advantages, first_tokens)])
    return batch.select(np.flatnonzero(has_signal)) if has_signal.any() else batch


@phase("credit")
def assign_credit(batch: Batch, algorithm: Algorithm) -> None:
    """Compute the advantage of each trained token, in place, by KL in the reward, GAE over a critic's values, and
    whitening.

    `batch.advantages` holds one number per episode before. A token's is then that number less the KL cost of this and
    all later tokens of its episode; with a critic it is computed from `batch.rewards` and `batch.values` instead, and
    `batch.returns` is set. The branches of an episode count as one sequence: the next branch comes after a branch.

    Raises:
        ValueError: the batch has no values that the algorithm needs, or not for all trained tokens.
    """
    kl_in_reward = algorithm.beta > 0 and algorithm.kl_in == "reward"
    if not (kl_in_reward or algorithm.needs_critic or algorithm.whiten):
        return

    counts = batch.trained_counts().tolist()

    def select_trained(name: str) -> torch.Tensor:
        values = getattr(batch, name)
        if values is None or np.isnan(values[batch.mask]).any():
            raise ValueError(f"{type(algorithm).__name__} needs {name} of every trained token")
        return torch.from_numpy(values[batch.mask])

    advantages = select_trained("advantages")
    mask = pad_sequences(torch.ones_like(advantages), counts)
    kl_cost = torch.zeros_like(advantages)
    if kl_in_reward:
        kl_cost = algorithm.beta * kl(select_trained("logprobs"), select_trained("ref_logprobs"), algorithm.kl)

    if algorithm.needs_critic:
        rewards = pad_sequences(select_trained("rewards") - kl_cost, counts)
        values = pad_sequences(select_trained("values"), counts)
        padded_advantages, returns = gae(rewards, values, mask, discount=algorithm.discount, trace=algorithm.trace)
        advantages = pack_sequences(padded_advantages, counts)
        batch.returns = np.zeros(len(batch.mask), np.float32)
        batch.returns[batch.mask] = pack_sequences(returns, counts).numpy()
        _record_explained_variance(batch)
    elif kl_in_reward:
        # Without a critic: GAE with values 0 is the undiscounted sum of the costs of this and all later tokens.
        future_cost, _ = gae(pad_sequences(kl_cost, counts), torch.zeros_like(mask), mask)
        advantages = advantages - pack_sequences(future_cost, counts)

    if algorithm.whiten:
        advantages = whiten_values(advantages)
    batch.advantages[batch.mask] = advantages.numpy()


def _record_explained_variance(batch: Batch) -> None:
    """Record the share of the returns' variance that the critic's values explain."""
    assert batch.returns is not None and batch.values is not None
    returns = batch.returns[batch.mask]
    variance = np.var(returns, dtype=np.float64)
    if variance > (ROUNDING * np.abs(returns).max()) ** 2:  # equal returns have no variance to explain
        unexplained = np.var((batch.returns - batch.values)[batch.mask], dtype=np.float64) / variance
        record_metric("critic/explained_variance", 1.0 - float(unexplained))
