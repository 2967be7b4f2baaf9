"""Environments as recipes use them: groups of scored episodes, and evaluation on held-out tasks.

One verb, `rollout`, plays a prompt with a reward function (`SingleTurnEnv`) or a dialogue (`forge_envs.MultiTurnEnv`).
Evaluation is the same verb with greedy decoding.
"""

import asyncio
import bisect
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..observability import phase, record_metric
from ..rewards.rules.math import final_answer
from ..types import Episode, Sample

MAX_UNSCORED_GROUPS = 64


class PolicyService(Protocol):
    """A service of generators, each episode in a `session()` of it, or any object with such an endpoint."""

    @property
    def generate(self) -> Any:
        """`await generate.route(token_ids, max_tokens=, stop_token_ids=, seed=, **sampling) -> Completion`"""


class GroupEnv(ABC):
    """Plays groups of episodes of a sample and scores them."""

    def __init__(self) -> None:
        self._unscored_groups = 0

    @abstractmethod
    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """n episodes; `reward` is None where unscored, `info["correct"]` is None where unknown. With `evaluation`,
        rewards that learn must not learn from them."""

    async def rollout(
        self, policy: PolicyService, sample: Sample, n: int = 1, seed: int = 0, **sampling: Any
    ) -> list[Episode]:
        """n scored episodes of the same sample, from the same start.

        Args:
            policy: a service with `generate`, see `PolicyService`.
            seed: of the environment and of what the policy draws.
            sampling: fields of `forge.types.Sampling` that differ from the policy's defaults.

        Raises:
            NothingScored: all episodes of `MAX_UNSCORED_GROUPS` groups in a row are unscored: the run would never end.
        """
        episodes = await self.play(policy, sample, n, seed, evaluation=False, **sampling)
        for episode in episodes:
            if not episode.had_no_turn:
                record_metric("episode/unscored", episode.outcome is None)
        # A reward that scores nothing would let the run wait forever.
        scored = any(episode.outcome is not None for episode in episodes)
        self._unscored_groups = 0 if scored else self._unscored_groups + 1
        if self._unscored_groups == MAX_UNSCORED_GROUPS:
            info = {name: value for name, value in episodes[0].info.items() if name != "messages"}
            raise NothingScored(
                f"no episode of {MAX_UNSCORED_GROUPS} groups in a row could be scored; of the last one: {info}, prompt "
                f"{str(sample[0])!r:.200}, response {episodes[0].text!r:.200}"
            )
        return episodes

    async def evaluate(
        self,
        policy: PolicyService,
        samples: Sequence[Sample],
        keep: Callable[[Sequence[Sample], Sequence[Episode]], None] | None = None,
        *,
        n: int = 1,
        prefix: str = "eval",
        **sampling: Any,
    ) -> dict[str, float]:
        """`eval/accuracy` and more of n answers to each sample, see `forge.envs.group.summarise_answers`; empty without
        samples.

        Args:
            keep: gets the episodes with their samples, each sample n times.
            sampling: fields of `forge.types.Sampling`; without a temperature one answer is greedy, and several are
                sampled at 1.
        """
        if not samples:
            return {}
        settings = {"temperature": 0.0 if n == 1 else 1.0, **sampling}
        # The number of a problem is its seed: an evaluation draws the same answers each time.
        with phase("evaluate"):
            plays = (
                self.play(policy, task, n, number, evaluation=True, **settings) for number, task in enumerate(samples)
            )
            groups = await asyncio.gather(*plays)
        if keep is not None:
            keep([sample for sample in samples for _ in range(n)], [episode for group in groups for episode in group])
        return {f"{prefix}/{name}": value for name, value in summarise_answers(groups, n).items()}


class SingleTurnEnv(GroupEnv):
    """A reward as an environment of one step.

    Args:
        reward: a service of `forge.actors.RewardActor`.
        tokenizer: the policy's, needed if the reward scores steps, to find the tokens at which they end.
        with_tokens: the reward gets whole completions, with tokens and log-probabilities, not only their texts.
    """

    def __init__(self, reward: Any, tokenizer: Any = None, *, with_tokens: bool = False) -> None:
        super().__init__()
        self.reward, self.tokenizer, self.with_tokens = reward, tokenizer, with_tokens

    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """Sample n responses and score them together."""
        prompt, target = sample
        # One request samples all responses: the prompt is computed once.
        completions = await policy.generate.route(prompt.bare, n=n, seed=seed, **sampling)
        texts = [completion.text for completion in completions]

        # Tokens travel only where something reads them; experts are only for the trainer.
        given = [replace(completion, experts=None) for completion in completions] if self.with_tokens else None
        scores = await self.reward.score.route(prompt, texts, target, evaluation, given)
        episodes = []

        for completion, score in zip(completions, scores, strict=True):
            info = {"correct": score.correct, "parts": score.parts}
            info |= {"unscored": score.reason} if score.reason else {}
            info |= {"extras": score.extras} if score.extras else {}
            episodes.append(Episode(completion, score.reward, info=info))
            if score.steps and self.tokenizer is not None:
                context, ids = len(completion.prompt_ids), completion.token_ids
                episodes[-1].steps = tuple((context + self._tokens_to(end, ids), earned) for end, earned in score.steps)

        return episodes

    def _tokens_to(self, end: int, ids: list[int]) -> int:
        """Return the number of tokens up to the character `end` of their text."""

        def characters(count: int) -> int:
            return len(self.tokenizer.decode(ids[:count], skip_special_tokens=True))

        return bisect.bisect_left(range(len(ids)), end, lo=1, key=characters)


Z = 1.96  # standard errors of a 95 % interval


class NothingScored(RuntimeError):
    """No reward has scored any episode."""


def summarise_answers(groups: Sequence[Sequence[Episode]], n: int) -> dict[str, float]:
    """Return what the answers to problems say.

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
        values[f"maj@{n}"] = [is_majority_right(group) for group in judged if len(group) == n]

    metrics: dict[str, float] = {}
    for name, shares in values.items():
        if shares:
            metrics[name] = sum(shares) / len(shares)
            metrics[f"{name}/margin"] = half_interval(metrics[name], len(shares))

    rewards = [episode.outcome for episode in episodes if episode.outcome is not None]
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
    metrics["turns"] = sum(max(1, len(episode.turns)) for episode in episodes) / len(episodes)
    metrics["unscored"] = 1.0 - sum(total for total, _ in counts) / len(episodes)

    return metrics


def pass_at(k: int, total: int, right: int) -> float:
    """Return the probability that of k of `total` answers, drawn without replacement, one is among the `right` ones.

    >>> pass_at(1, total=4, right=1)
    0.25
    """
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def is_majority_right(group: Sequence[Episode]) -> float:
    """Return whether the most frequent answer to a problem is right; of answers that are equally frequent, the
    share."""
    answers = [final_answer(episode.text) or episode.text.strip() for episode in group]
    votes = Counter(answers)
    most = max(votes.values())
    # One answer may be scored in several ways, as its response also counts: its mean.
    right = Counter[str]()
    for answer, episode in zip(answers, group, strict=True):
        right[answer] += bool(episode.info["correct"])
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(right[answer] / most for answer in winners) / len(winners)


def half_interval(share: float, count: int) -> float:
    """Return half of Wilson's 95 % interval of a share over `count` problems.

    >>> round(half_interval(0.5, 100), 3)
    0.096
    """
    spread = share * (1 - share) / count + Z**2 / (4 * count**2)
    return Z * math.sqrt(spread) / (1 + Z**2 / count)
