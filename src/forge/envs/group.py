"""Environments as recipes use them: groups of scored episodes, and evaluation on held-out tasks.

`rollout` plays a group of episodes of a prompt: single answers that a reward scores (`SingleTurnEnv`), or dialogues
(`forge_envs.MultiTurnEnv`). `evaluate` plays the same episodes, by default with greedy decoding.
"""

import asyncio
import bisect
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..observability import phase, record_values
from ..rewards.rules.comparison import first_equal
from ..rewards.rules.math import final_answer
from ..types import Episode, Sample

MAX_UNSCORED_GROUPS = 64  # groups in succession without any score, after which a run fails


class PolicyService(Protocol):
    """Protocol of a policy: a service of generators, or any object with the endpoint `generate`."""

    @property
    def generate(self) -> Any:
        """Return the endpoint that samples: `await generate.route(token_ids, max_tokens=, stop_token_ids=, seed=,
        **sampling)` returns a `Completion`, or a list of n completions with `n`."""


class GroupEnv(ABC):
    """Base class of environments that play groups of episodes of a sample and score the episodes."""

    def __init__(self) -> None:
        self._unscored_groups = 0

    @abstractmethod
    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """Play n episodes of a sample, and return the scored episodes.

        The `reward` of an episode is None if it is unscored, and its `info["correct"]` is None if it is unknown whether
        it is right.

        Args:
            seed: of the environment and of sampling.
            evaluation: whether the episodes are for an evaluation, from which rewards that learn must not learn.
            sampling: fields of `forge.types.Sampling` that differ from the policy's defaults.
        """

    async def rollout(
        self, policy: PolicyService, sample: Sample, n: int = 1, seed: int = 0, **sampling: Any
    ) -> list[Episode]:
        """Return n scored episodes of the same sample for training, from the same start of the environment.

        Args:
            policy: a service with `generate`, see `PolicyService`.
            seed: of the environment and of sampling.
            sampling: fields of `forge.types.Sampling` that differ from the policy's defaults.

        Raises:
            NothingScored: all episodes of `MAX_UNSCORED_GROUPS` groups in succession are unscored.
        """
        episodes = await self.play(policy, sample, n, seed, evaluation=False, **sampling)
        record_values("episode/unscored", [episode.outcome is None for episode in episodes if not episode.had_no_turn])

        # Unscored groups are not trained on, so a reward that never scores would let the run wait forever.
        is_scored = any(episode.outcome is not None for episode in episodes)
        self._unscored_groups = 0 if is_scored else self._unscored_groups + 1
        if self._unscored_groups == MAX_UNSCORED_GROUPS:
            info = {name: value for name, value in episodes[0].info.items() if name != "messages"}
            raise NothingScored(
                f"no episode of {MAX_UNSCORED_GROUPS} consecutive groups could be scored: check the reward or "
                f"environment. Last episode: {info}, prompt {str(sample[0])!r:.200}, response "
                f"{episodes[0].text!r:.200}"
            )
        return episodes

    async def evaluate(
        self,
        policy: PolicyService,
        samples: Sequence[Sample],
        keep: Callable[[Sequence[Sample], Sequence[Episode]], None] | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        prefix: str = "eval",
        **sampling: Any,
    ) -> dict[str, float]:
        """Return the metrics of n answers to each sample, such as `eval/accuracy`; empty without samples.

        Args:
            keep: called with the samples, each n times, and their episodes in the same order; None: they are dropped.
            n: answers to each sample.
            seed: of the first sample, each later one's is larger by 1; None: 0.
            prefix: of the metrics, which `forge.envs.group.summarise_answers` describes.
            sampling: fields of `forge.types.Sampling`. The default temperature is 0 for one answer, and 1 for several.
        """
        if not samples:
            return {}

        # The seeds follow from the numbers of the problems, so that each evaluation samples with the same ones.
        settings = {"temperature": 0.0 if n == 1 else 1.0, **sampling}
        with phase("evaluate"):
            plays = (
                self.play(policy, sample, n, sample_seed, evaluation=True, **settings)
                for sample_seed, sample in enumerate(samples, seed or 0)
            )
            groups = await asyncio.gather(*plays)

        if keep is not None:
            keep([sample for sample in samples for _ in range(n)], [episode for group in groups for episode in group])

        # In a thread: a symbolic comparison of two answers may take most of a second.
        metrics = await asyncio.to_thread(summarise_answers, groups, n)
        return {f"{prefix}/{name}": value for name, value in metrics.items()}


class SingleTurnEnv(GroupEnv):
    """An environment of one turn: the policy answers a prompt, and a reward scores the answer.

    Args:
        reward: a service of `forge.actors.RewardActor`.
        tokenizer: the policy's; needed only if the reward scores steps, to find the tokens at which they end.
        with_tokens: whether the reward gets completions with tokens and log-probabilities, and not only texts.
    """

    def __init__(self, reward: Any, tokenizer: Any = None, *, with_tokens: bool = False) -> None:
        super().__init__()
        self.reward, self.tokenizer, self.with_tokens = reward, tokenizer, with_tokens

    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """Return n episodes: responses to a prompt, which the reward scores together."""
        prompt, target = sample

        # One request for all responses, so that the prompt is computed once.
        completions = await policy.generate.route(prompt.bare, n=n, seed=seed, **sampling)
        texts = [completion.text for completion in completions]

        # Tokens are sent only if the reward reads them; the recorded experts are only for the trainer.
        sent_tokens = [replace(completion, experts=None) for completion in completions] if self.with_tokens else None
        scores = await self.reward.score.route(prompt, texts, target, evaluation, sent_tokens)

        episodes = []
        for completion, score in zip(completions, scores, strict=True):
            info = {"correct": score.correct, "parts": score.parts}
            optional_info = {"unscored": score.reason, "extras": score.extras}
            info |= {name: value for name, value in optional_info.items() if value}
            episodes.append(Episode(completion, score.reward, info=info))
            episodes[-1].images = prompt.images

            if score.steps and self.tokenizer is not None:
                # A step ends at a character of the response's text; an episode needs the position of its token.
                context, ids = len(completion.prompt_ids), completion.token_ids
                episodes[-1].steps = tuple((context + self._tokens_to(end, ids), earned) for end, earned in score.steps)

        return episodes

    def _tokens_to(self, end: int, ids: list[int]) -> int:
        """Return the smallest number of tokens whose text has at least `end` characters."""
        return bisect.bisect_left(
            range(len(ids)),
            end,
            lo=1,
            key=lambda count: len(self.tokenizer.decode(ids[:count], skip_special_tokens=True)),
        )


Z = 1.96  # standard errors of a 95 % interval


class NothingScored(RuntimeError):
    """Error: no episode could be scored by a reward or environment."""


def summarise_answers(groups: Sequence[Sequence[Episode]], n: int) -> dict[str, float]:
    """Return the metrics of the answers to problems.

    - `accuracy`: the mean share of right answers to a problem.
    - `pass@k`, for n > 1 and k of 1, 2, 4, ... and n: the probability that at least one of k answers is right, unbiased
      as in Chen et al. 2021 (arXiv 2107.03374).
    - `maj@n`, for n > 1: the share of problems whose most frequent answer is right.
    - `NAME/margin` of each of these: half of its 95 % interval over problems (Wilson's, which is not 0 if all are
      equal).
    - `reward` and `turns`: means over the episodes.
    - `truncated`: the share of answers that end at the limit of tokens.
    - `unscored`: the share of answers that are left out above, since it is unknown whether they are right.

    Args:
        groups: the n episodes of each problem.

    Raises:
        NothingScored: of no episode it is known whether it is right.
    """
    episodes = [episode for group in groups for episode in group]
    judged_groups = [[episode for episode in group if episode.info["correct"] is not None] for group in groups]
    if not (judged_groups := list(filter(None, judged_groups))):
        raise NothingScored(f"no episode of the evaluation could be scored: {episodes[0].info}")

    # Of each problem: the number of judged answers and of right ones.
    counts = [(len(group), sum(bool(episode.info["correct"]) for episode in group)) for group in judged_groups]
    shares_by_metric = {"accuracy": [right / total for total, right in counts]}
    if n > 1:
        powers_of_two = {1 << power for power in range(1, n.bit_length())}
        # A problem with fewer than k scored answers does not count.
        shares_by_metric |= {
            f"pass@{k}": [pass_at(k, total, right) for total, right in counts if total >= k]
            for k in sorted({*powers_of_two, n})
        }
        shares_by_metric[f"maj@{n}"] = [is_majority_right(group) for group in judged_groups if len(group) == n]

    metrics: dict[str, float] = {}
    for name, shares in shares_by_metric.items():
        if shares:
            metrics[name] = sum(shares) / len(shares)
            metrics[f"{name}/margin"] = half_interval(metrics[name], len(shares))

    rewards = [episode.outcome for episode in episodes if episode.outcome is not None]
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)

    finishes = [episode.turns[-1].finish if episode.turns else episode.info.get("finish") for episode in episodes]
    return metrics | {
        "turns": sum(max(1, len(episode.turns)) for episode in episodes) / len(episodes),
        "truncated": finishes.count("length") / len(episodes),
        "unscored": 1.0 - sum(total for total, _ in counts) / len(episodes),
    }


def pass_at(k: int, total: int, right: int) -> float:
    """Return the probability that at least one of k answers, drawn without replacement from `total` answers, is one of
    the `right` ones.

    >>> pass_at(1, total=4, right=1)
    0.25
    """
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def is_majority_right(group: Sequence[Episode]) -> float:
    """Return 1.0 if the most frequent answer to a problem is right, else 0.0; if several answers are equally frequent,
    their mean.

    All right answers are one answer, as each equals the target. Wrong ones are compared as `MathReward` compares an
    answer with a target.
    """
    answers = [final_answer(episode.text) or episode.text.strip() for episode in group]
    right_answers = {answer for answer, episode in zip(answers, group, strict=True) if episode.info["correct"]}
    wrong_answers = [answer for answer in answers if answer not in right_answers]

    # Responses with the same answer may be scored differently, so the right answer counts with their mean.
    right_votes = len(answers) - len(wrong_answers)
    right_share = sum(bool(episode.info["correct"]) for episode in group) / max(right_votes, 1)
    if not right_answers or right_votes > len(wrong_answers):
        return right_share

    # Each wrong answer, spelled as the first one that equals it.
    spellings: list[str] = []
    for answer in wrong_answers:
        spellings.append(first_equal(answer, dict.fromkeys(spellings)))
    votes = [right_votes, *Counter(spellings).values()]
    return right_share / votes.count(max(votes)) if right_votes == max(votes) else 0.0


def half_interval(share: float, count: int) -> float:
    """Return half of the width of Wilson's 95 % interval, for a share of right answers over `count` problems.

    >>> round(half_interval(0.5, 100), 3)
    0.096
    """
    spread = share * (1 - share) / count + Z**2 / (4 * count**2)
    return Z * math.sqrt(spread) / (1 + Z**2 / count)
