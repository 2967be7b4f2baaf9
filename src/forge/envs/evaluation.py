"""What answers to held-out problems say of a policy, and with how much certainty."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..rewards.rules.math import final_answer
from ..types import Episode

Z = 1.96  # standard errors of a 95 % interval


class NothingScored(RuntimeError):
    """No reward has scored any episode."""


def summarise(groups: Sequence[Sequence[Episode]], n: int) -> dict[str, float]:
    """What the answers to problems say.

    Args:
        groups: the n episodes of each problem. Those of which it is unknown whether they are right are left out.

    Returns:
        accuracy: the mean share of right answers; for n > 1 also pass@k, the probability that one of k answers is
        right, for powers of 2 and n, unbiased as of Chen et al. 2021 (arXiv 2107.03374), and maj@n, whether the most
        frequent answer is right. Each with `/margin`, half of its 95 % interval over problems (Wilson's, which is not
        0 where all are equal). `reward`, the mean; `turns`; `unscored`, the share of answers that were left out.

    Raises:
        NothingScored: none could be scored.
    """
    episodes = [episode for group in groups for episode in group]
    judged = [[episode for episode in group if episode.info["correct"] is not None] for group in groups]
    judged = [group for group in judged if group]
    if not judged:
        raise NothingScored(f"no episode of the evaluation could be scored: {episodes[0].info}")
    counts = [(len(group), sum(bool(episode.info["correct"]) for episode in group)) for group in judged]
    values = {"accuracy": [right / total for total, right in counts]}
    if n > 1:
        for k in sorted({*(1 << power for power in range(1, n.bit_length())), n}):
            # Of a problem with fewer scored answers it is not known.
            values[f"pass@{k}"] = [pass_at(k, total, right) for total, right in counts if total >= k]
        values[f"maj@{n}"] = [majority(group) for group in judged if len(group) == n]
    metrics: dict[str, float] = {}
    for name, shares in values.items():
        if shares:
            metrics[name] = sum(shares) / len(shares)
            metrics[f"{name}/margin"] = margin(metrics[name], len(shares))
    rewards = [episode.outcome for episode in episodes if episode.outcome is not None]
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
    metrics["turns"] = sum(max(1, len(episode.turns)) for episode in episodes) / len(episodes)
    metrics["unscored"] = 1.0 - sum(total for total, _ in counts) / len(episodes)
    return metrics


def pass_at(k: int, total: int, right: int) -> float:
    """The probability that of k of `total` answers, drawn without replacement, one is among the `right` ones."""
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def majority(group: Sequence[Episode]) -> float:
    """Whether the most frequent answer to a problem is right; of answers that are equally frequent, the share."""
    answers = [final_answer(episode.text) or episode.text.strip() for episode in group]
    votes = Counter(answers)
    most = max(votes.values())
    # One answer may be scored in several ways, as its response also counts: its mean.
    right = Counter[str]()
    for answer, episode in zip(answers, group, strict=True):
        right[answer] += bool(episode.info["correct"])
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(right[answer] / most for answer in winners) / len(winners)


def margin(share: float, count: int) -> float:
    """Half of Wilson's 95 % interval of a share over `count` problems."""
    spread = share * (1 - share) / count + Z**2 / (4 * count**2)
    return Z * math.sqrt(spread) / (1 + Z**2 / count)
