"""The data that flows between components: prompts, completions, episodes and groups.

Everything here is plain Python and numpy, and pickles without torch. Tokens in, tokens out: `text` is for people and
rewards, training only ever reads token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from ..system.extras import find_foreign_name as __getattr__  # noqa: F401  (other names of torchforge)
from .batches import Batch as Batch, Pair as Pair, Seen as Seen
from .conversation import Conversation as Conversation
from .sampling import TOP_LOGPROBS as TOP_LOGPROBS, Sampling as Sampling, Spans as Spans, are_texts as are_texts

Info = dict[str, Any]  # what a user, a reward or an environment says of an episode; plain values
UNKNOWN_EXPERT = 255  # instead of an expert that was not recorded


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for generation. `token_ids` is what the policy sees; `str(prompt)` is its text.

    `row` has those columns of the prompt's row in the data set that rewards name, as plain data. `messages` is the
    prompt as a conversation; `conversational` says that the row has these messages itself. `stop_ids` are tokens that
    end an answer to it, in addition to the generator's. If it has messages, `text` is a `Conversation`. `images` are
    bytes of files, in the order of their tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # position in the data stream, unique within a run
    row: Info = field(default_factory=dict, compare=False)
    messages: tuple[Info, ...] = field(default=(), compare=False)
    conversational: bool = field(default=False, compare=False)
    stop_ids: tuple[int, ...] = field(default=(), compare=False)
    images: tuple[bytes, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return str(self.text)  # without the row of a `Conversation`

    @property
    def task(self) -> Prompt:
        """Return the prompt as an environment or an agent gets it: its text is what the messages say, without the
        markers of a chat template."""
        return replace(self, text=Conversation(self.text).plain)

    @property
    def bare(self) -> Prompt:
        """Return a copy of the prompt for a generator, without row and messages."""
        return replace(self, text=str(self.text), row={}, messages=())


class Sample(NamedTuple):
    """Item of a dataset, a prompt with its target: `prompt, target = await dataset.sample.route()`."""

    prompt: Prompt
    target: str


def oldest_version(versions: Iterable[int]) -> int:
    """Return the oldest of some policy versions, where -1 means unknown; -1 if none is known.

    >>> oldest_version([3, -1, 5])
    3
    """
    return min((version for version in versions if version >= 0), default=-1)


@dataclass(slots=True)
class Completion:
    """Sampled continuation of a prompt: `Completion(text, token_ids, logprobs, metadata)`.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution it was drawn from (after
    temperature, grammar, top-k and top-p; greedy decoding has temperature 1's under the grammar), and
    `versions[i]` the policy version that drew it, -1 if that is not known. `finish` is "stop" (a stop token, included
    in `token_ids`) or "length". `metadata` is the user's, and goes into the `info` of an episode. `identities` has, for
    every version in `versions`, the identity of the weights that drew its tokens: the digest that their publisher
    stated, or "". `sampled_by` names the replica of the generator.

    `top_logprobs` is empty unless the request asked for it. `top_logprobs[i]` then has the most probable tokens at the
    position of `token_ids[i]`, in descending order, with their log-probabilities under that same distribution: as
    many as requested, or as are left after top-k and top-p. `token_ids[i]` need not be one of them. Episodes leave it
    out.

    `experts`, with `generator.router_replay`, has the experts that computed each token of `prompt_ids` and `token_ids`:
    uint8 [tokens, layers with experts, experts of a token], in descending order of their gates. It is `UNKNOWN_EXPERT`
    for the last token, which was not computed, and in the last layer for prompt tokens but the last, whose feed-forward
    there affects no drawn token. Tokens that were computed again under newer weights have the newer experts, but in the
    last layer.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    metadata: Info = field(default_factory=dict)
    prompt_ids: tuple[int, ...] = ()
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    identities: dict[int, str] = field(default_factory=dict)
    sampled_by: str = ""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    experts: np.ndarray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.versions:
            self.versions = [-1] * len(self.token_ids)

    @property
    def version(self) -> int:
        """Return the oldest known policy version that sampled a token of the completion; -1 if none is known."""
        return oldest_version(self.versions)

    @property
    def generator_version(self) -> int:
        """Return `version`, under torchforge's name for it."""
        return self.version

    @property
    def stop_reason(self) -> str:
        """Return `finish`, under torchforge's name for it."""
        return self.finish


class Origin(NamedTuple):
    """Origin of tokens: the policy version, the identity of its weights ("" if it was not stated) and the replica that
    sampled them."""

    version: int
    identity: str = ""
    sampled_by: str = ""


class Turn(NamedTuple):
    """One turn of the policy: the tokens from `start` to `end` - 1 of an episode.

    `version` is the oldest policy version that drew one of them, `finish` the completion's, and `reward` the
    environment's for the turn.
    """

    start: int
    end: int
    version: int
    finish: str
    reward: float = 0.0


NO_TURN = "no_turn"  # the `stop` of an episode whose policy had no turn


@dataclass(slots=True, init=False)
class Episode:
    """A token sequence to learn from, with mask, logprob and version of every token.

    The four arrays have one length. `mask[i]` says that the policy wrote token i; context tokens have mask False,
    logprob 0 and version -1. `reward` None means unscored: the episode is dropped and counted, never read as zero.
    An episode built without `logprobs` has an unknown behaviour policy: the trainer then uses its current policy's
    log-probabilities. `weight` multiplies its share of the loss.

    `turns` has the turns of an episode of several turns; the part of `reward` that is not theirs came at the end. Each
    time the conversation was rewritten a new episode started: `branches` are the ones before this one, and the reward
    of each is the sum of what came after its start. `steps` has rewards within the episode as (number of tokens until
    the end of the step, reward); they are part of `reward`. `experts` are as in a completion, for all tokens. `policy`
    is the name of the player whose episode it is, in a game of several players. `images` are the prompt's.

    Call forms: `Episode(completion, reward)`,
    `Episode(prompt_ids=..., response_ids=..., reward=..., logprobs=..., versions=...)`; for tokens that somebody else
    wrote, `Episode.given(tokens, mask)`; and `Episode.played(...)` for an episode of several turns.
    """

    tokens: list[int]
    mask: list[bool]
    logprobs: list[float] | None
    versions: list[int]
    reward: float | None
    advantage: float | Sequence[float] | None  # of all its trained tokens, or of each
    weight: float
    text: str
    info: Info
    origins: frozenset[Origin]  # one for each version among `versions`
    turns: tuple[Turn, ...]
    branches: tuple[Episode, ...]
    steps: tuple[tuple[int, float], ...]
    experts: np.ndarray | None = field(default=None, compare=False)
    policy: str = ""
    images: tuple[bytes, ...] = field(default=(), compare=False)

    def __init__(
        self,
        completion: Completion | None = None,
        reward: float | None = None,
        *,
        prompt_ids: tuple[int, ...] | list[int] = (),
        response_ids: list[int] | None = None,
        logprobs: list[float] | None = None,
        versions: list[int] | None = None,
        advantage: float | Sequence[float] | None = None,
        weight: float = 1.0,
        info: Info | None = None,
    ) -> None:
        if (completion is None) == (response_ids is None):
            raise ValueError("pass an Episode either a completion or prompt_ids and response_ids")

        # A completion has all values of the other form.
        source = completion or Completion()
        info = {**source.metadata, **(info or {})}
        if completion is not None:
            prompt_ids = completion.prompt_ids
            response_ids = completion.token_ids
            logprobs = completion.logprobs
            versions = completion.versions
            info.setdefault("finish", completion.finish)

        # An empty response has nothing to train, and no turn to score.
        if not (response := list(response_ids or ())):
            raise ValueError("an Episode needs at least one response token, got none")

        for name, values in (("logprobs", logprobs), ("versions", versions)):
            if values is not None and len(values) != len(response):
                raise ValueError(
                    f"{name} must have one entry for each of the {len(response)} response tokens, got {len(values)}"
                )

        # The prompt is context: not trained, without a sampler.
        context = len(prompt_ids)
        self.tokens = [*prompt_ids, *response]
        self.mask = [False] * context + [True] * len(response)
        self.logprobs = None if logprobs is None else [0.0] * context + list(logprobs)
        self.versions = [-1] * context + list([-1] * len(response) if versions is None else versions)

        self.reward, self.advantage, self.weight = reward, advantage, weight
        identities = source.identities
        self.origins = frozenset(Origin(v, identities.get(v, ""), source.sampled_by) for v in {*(versions or ())})
        self.text = source.text
        self.info = info
        self.experts = source.experts
        self.turns = self.branches = self.steps = self.images = ()
        self.policy = ""

    @classmethod
    def given(cls, tokens: list[int], mask: list[bool], *, weight: float = 1.0) -> Episode:
        """Return an episode of given tokens, to imitate where `mask` is True, with advantage 1.

        Raises:
            ValueError: the lengths differ, or no token is to be imitated.
        """
        if len(tokens) != len(mask) or not any(mask):
            raise ValueError(
                f"{len(tokens)} tokens and mask must have equal lengths and mask at least one True, got {len(tokens)} "
                f"tokens, {len(mask)} mask values, {sum(mask)} True"
            )

        start = mask.index(True)
        episode = cls(prompt_ids=tokens[:start], response_ids=tokens[start:], advantage=1.0, weight=weight)
        episode.mask = list(mask)
        return episode

    @classmethod
    def played(
        cls,
        tokens: list[int],
        mask: list[bool],
        logprobs: list[float],
        versions: list[int],
        *,
        turns: Iterable[Turn] = (),
        reward: float | None = None,
        origins: Iterable[Origin] = (),
        text: str = "",
        info: Info | None = None,
        experts: np.ndarray | None = None,
    ) -> Episode:
        """Return an episode of several turns. Without a turn there is nothing to learn, and `reward` must be None.

        Raises:
            ValueError: the arrays differ in length or contradict one another, or turns have other tokens than `mask`.
        """
        if not len(tokens) == len(mask) == len(logprobs) == len(versions):
            lengths = [len(array) for array in (tokens, mask, logprobs, versions)]
            raise ValueError(f"tokens, mask, logprobs and versions must have one length, not {lengths}")
        if any((version < 0) == trained for version, trained in zip(versions, mask, strict=True)):
            raise ValueError("versions must be at least 0 exactly where mask is True (tokens that the policy sampled)")
        if any(logprob and not trained for logprob, trained in zip(logprobs, mask, strict=True)):
            raise ValueError("logprobs must be 0 where mask is False (tokens that the policy did not sample)")

        all_turns = tuple(turns)
        if sum(turn.end - turn.start for turn in all_turns) != sum(mask) or (reward is not None and not any(mask)):
            raise ValueError(
                "turns must cover exactly the tokens where mask is True, and a reward needs at least one turn"
            )

        episode = cls(response_ids=tokens, logprobs=logprobs, versions=versions, reward=reward, info=info)
        episode.mask, episode.turns, episode.origins = mask, all_turns, frozenset(origins)
        episode.text, episode.experts = text, experts
        return episode

    @property
    def version(self) -> int:
        """Return the oldest known version among the tokens that the policy wrote, in all branches; -1 if none is
        known."""
        return oldest_version({*compress(self.versions, self.mask), *(branch.version for branch in self.branches)})

    @property
    def had_no_turn(self) -> bool:
        """Return whether the episode's policy had no turn in a game of several players. Such an episode has no score,
        and is not counted as lost."""
        return bool(self.policy) and self.info.get("stop") == NO_TURN

    @property
    def outcome(self) -> float | None:
        """Return the reward of the whole episode, earlier branches included; None if it is unscored."""
        return self.branches[0].reward if self.branches else self.reward


@dataclass(slots=True)
class Group:
    """The episodes of one prompt, scored together. The texts `target` and `prompt` are for people.

    `index` is the prompt's in the data stream: it orders groups, and a replay buffer accepts each index once in a run.
    -1: the prompt has none. `samples` has the number of each episode among the prompt's samples; () means that none was
    dropped.
    """

    episodes: list[Episode]
    index: int = -1
    target: str = ""
    prompt: str = ""
    samples: tuple[int, ...] = ()

    @property
    def version(self) -> int:
        """Return the oldest known policy version among the group's episodes; -1 if none is known."""
        return oldest_version(episode.version for episode in self.episodes)

    def of(self, policy: str) -> Group:
        """Return a copy of the group with the episodes of one player only.

        The players of a game have different tasks, so that each is compared only with itself (role-conditioned
        advantages, SPIRAL, arXiv:2506.24119).
        """
        return replace(self, episodes=[episode for episode in self.episodes if episode.policy == policy], samples=())

    @property
    def has_signal(self) -> bool:
        """Return whether the outcomes of the episodes of some player differ.

        Raises:
            ValueError: an episode is unscored.
        """
        policies = [episode.policy for episode in self.episodes]
        return len({*zip(policies, self.rewards, strict=True)}) > len({*policies})

    @property
    def rewards(self) -> list[float]:
        """Return the outcome of each episode.

        Raises:
            ValueError: an episode is unscored; the replay buffer accepts none of those.
        """
        rewards = [outcome for episode in self.episodes if (outcome := episode.outcome) is not None]
        if len(rewards) < len(self.episodes):
            raise ValueError(f"group {self.index} has an unscored episode: drop or score it first")
        return rewards
