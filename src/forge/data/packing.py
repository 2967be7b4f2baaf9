"""Pack episodes into batches, and split a batch into the micro-batches of each data-parallel rank."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..types import UNKNOWN_EXPERT, Batch, Episode
from .prefixes import PrefixTree, find_prefixes, prefix_ids

if TYPE_CHECKING:
    from ..algorithms.base import Aggregation


def pack(
    episodes: Sequence[Episode], *, aggregation: "Aggregation" = "token_mean", horizon: int | None = None, unit: int = 1
) -> Batch:
    """Pack scored episodes into one batch: their sequences back to back, the earlier branches of an episode before the
    episode itself.

    Args:
        episodes: each is packed with all its branches, which need not be listed; one that is listed as well is packed
            only once. A branch without an advantage gets its episode's.
        aggregation: how tokens share the loss. `token_mean`: every trained token counts the same. `sequence_mean`:
            every episode counts the same, and its share is divided equally among the trained tokens of all its
            branches. `fixed_horizon`: every token counts 1 / (episodes * `horizon`), however long its episode is (Liu
            et al. 2025, Dr.GRPO). An episode's `weight` multiplies its tokens' shares; the two means are then means
            over weighted tokens or episodes.
        horizon: a number of tokens, for `fixed_horizon` only; 1 gives sums over tokens.
        unit: number of neighbouring sequences that are never separated, such as the 2 of a preference pair.

    Raises:
        ValueError: no episodes, an episode without an advantage, or one that trains its first token, which no context
            predicts; weights that are negative, not finite or all 0; a number of sequences that is not a multiple of
            `unit`.
    """
    if not episodes:
        raise ValueError("pack needs at least one episode, got an empty list")

    branches = {id(branch) for episode in episodes for branch in episode.branches}
    episodes = [episode for episode in episodes if id(episode) not in branches]

    # One row for each branch, with the episode that it belongs to.
    rows: list[Episode] = []
    advantages: list[float | Sequence[float]] = []
    for number, episode in enumerate(episodes):
        for row in (*episode.branches, episode):
            advantage = episode.advantage if row.advantage is None else row.advantage
            if advantage is None:
                raise ValueError(f"episode {number} has no advantage: compute advantages before packing")
            if row.mask[0]:
                raise ValueError(f"episode {number} must have at least one token before its first trained token")
            rows.append(row)
            advantages.append(advantage)

    if len(rows) % unit:
        raise ValueError(f"the number of episodes must be a multiple of unit = {unit}, got {len(rows)}")

    # Shares of the loss, which an episode's branches divide.
    row_episodes = np.repeat(np.arange(len(episodes)), [len(episode.branches) + 1 for episode in episodes])
    counts = np.array([sum(row.mask) for row in rows])
    episode_counts = np.bincount(row_episodes, counts)
    share = _loss_shares(episodes, episode_counts, aggregation, horizon)[row_episodes]
    branch_shares = counts / np.maximum(1, episode_counts[row_episodes])
    has_branches = len(rows) > len(episodes)

    def flatten_columns(columns: Iterable[Sequence], dtype: type) -> np.ndarray:
        return np.concatenate([np.asarray(column, dtype=dtype) for column in columns])

    # Columns of all rows, one after the other; NaN where the sampler of a trained token is unknown.
    mask = flatten_columns((row.mask for row in rows), np.bool_)
    lengths = np.array([len(row.tokens) for row in rows])
    unknown = {True: math.nan, False: 0.0}
    logprobs = ([unknown[trained] for trained in row.mask] if row.logprobs is None else row.logprobs for row in rows)

    return Batch(
        tokens=flatten_columns((row.tokens for row in rows), np.int64),
        lengths=lengths,
        mask=mask,
        logprobs=flatten_columns(logprobs, np.float32),
        versions=flatten_columns((row.versions for row in rows), np.int64),
        advantages=_advantages_of_tokens(advantages, lengths, mask),
        weights=np.repeat(share.astype(np.float32), lengths) * mask,
        rewards=_rewards_of_tokens(episodes),
        experts=_experts_of_tokens(rows),
        images=np.fromiter((row.images for row in rows), object) if any(row.images for row in rows) else None,
        episodes=row_episodes if has_branches else None,
        branch_shares=branch_shares.astype(np.float32) if has_branches else None,
        origins=frozenset().union(*(row.origins for row in rows)),
        unit=unit,
    )


def _advantages_of_tokens(
    advantages: Sequence[float | Sequence[float]], lengths: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Return [tokens], the advantage of each trained token, and 0 elsewhere.

    Args:
        advantages: of each sequence either one number for all its trained tokens, or one number for each of them.
        lengths: [sequences].
        mask: [tokens].

    >>> mask = np.array([False, True, True, False, True])
    >>> _advantages_of_tokens([2.0, [3.0, 4.0]], lengths=np.array([2, 3]), mask=mask).tolist()
    [0.0, 2.0, 3.0, 0.0, 4.0]
    """
    # Most sequences have one number, which one call repeats for all their tokens.
    sequence_advantages = [0.0 if isinstance(advantage, Sequence) else advantage for advantage in advantages]
    token_advantages = np.repeat(np.array(sequence_advantages, np.float32), lengths) * mask

    for start, length, advantage in zip(np.cumsum(lengths) - lengths, lengths, advantages, strict=True):
        if isinstance(advantage, Sequence):
            sequence = slice(start, start + length)
            token_advantages[sequence][mask[sequence]] = advantage

    return token_advantages


def pack_tensors(
    inputs: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]],
    *,
    aggregation: "Aggregation" = "token_mean",
    horizon: int | None = None,
    unit: int = 1,
) -> Batch:
    """Pack padded tensors into one batch without padding.

    Rows without a trained token are not packed, and count as sequences with a loss of 0.

    Args:
        inputs: one dict for each batch of rows: "tokens" [rows, prompt + response], and optionally "mask" of the same
            shape, 0 where a row is padded (prompts of different lengths are padded on the left).
        targets: one dict for each of `inputs`: "response" [rows, response], the end of "tokens"; "padding_mask" [rows,
            response], 1 where a token is trained; "advantages" [rows, response] or [rows, 1]; optionally
            "ref_logprobs" and "behaviour_logprobs" [rows, response], of the reference and of the sampling policy. NaN
            or absent "behaviour_logprobs" mean that the trainer's own policy sampled.
        aggregation, horizon, unit: as in `pack`.

    Raises:
        ValueError: a key is missing or unknown, or shapes or tokens do not fit.
    """
    if len(inputs) != len(targets) or not inputs:
        raise ValueError(f"train_step needs as many inputs as targets, got {len(inputs)} and {len(targets)}")

    episodes: list[Episode] = []
    columns: dict[str, list[np.ndarray]] = {"advantages": [], "ref_logprobs": [], "behaviour_logprobs": []}

    for number, (source, target) in enumerate(zip(inputs, targets, strict=True)):
        for name, tensors, needed, optional in (
            ("inputs", source, {"tokens"}, {"mask"}),
            ("targets", target, {"response", "advantages", "padding_mask"}, {"ref_logprobs", "behaviour_logprobs"}),
        ):
            if missing := needed - tensors.keys():
                raise ValueError(f"{name}[{number}] must have the key {min(missing)!r}")
            if unknown := tensors.keys() - needed - optional:
                raise ValueError(f"{name}[{number}] has the unknown key {min(unknown)!r}")

        tokens = np.asarray(source["tokens"])
        response = np.asarray(target["response"])
        present = np.asarray(source.get("mask", np.ones_like(tokens))).astype(bool)
        trained = np.asarray(target["padding_mask"]).astype(bool)

        if tokens.ndim != 2 or present.shape != tokens.shape or response.shape != trained.shape:
            raise ValueError(
                f"batch {number}: tokens {tokens.shape} and mask {present.shape} must be [rows, length], response "
                f"{response.shape} and padding_mask {trained.shape} [rows, length of the response]"
            )

        start = tokens.shape[1] - response.shape[1]
        if start < 1 or len(tokens) != len(response) or (tokens[:, start:] != response)[trained].any():
            raise ValueError(f"targets[{number}]['response'] is not the end of inputs[{number}]['tokens']")

        # Padding goes, and so does all that comes after a row's last trained token: a maximum from the right is 1 up to
        # that token.
        present[:, start:] &= np.flip(np.maximum.accumulate(np.flip(trained, 1), 1), 1)
        has_trained = trained.any(1)
        for row in np.flatnonzero(has_trained):
            mask = np.concatenate([np.zeros(start, bool), trained[row]])
            episodes.append(Episode.given(tokens[row, present[row]].tolist(), mask[present[row]].tolist()))
        for name, rows in columns.items():
            if name in target:
                padded = np.zeros(tokens.shape, np.float32)
                padded[:, start:] = np.where(trained, np.asarray(target[name], np.float32), 0.0)
                rows.append(padded[has_trained][present[has_trained]])

    batch = pack(episodes, aggregation=aggregation, horizon=horizon, unit=unit)
    if aggregation != "token_mean":
        # Rows without a trained token are not packed, and count in the mean.
        batch.weights *= np.float32(len(episodes) / sum(len(target["response"]) for target in targets))
    for name, rows in columns.items():
        if rows and len(rows) < len(inputs):
            raise ValueError(f"either all targets or none must have {name!r}")
    batch.advantages = np.concatenate(columns["advantages"])
    if columns["ref_logprobs"]:
        batch.ref_logprobs = np.concatenate(columns["ref_logprobs"])
    if columns["behaviour_logprobs"]:
        batch.logprobs = np.concatenate(columns["behaviour_logprobs"])

    return batch


def split_batch(batch: Batch, *, ranks: int, max_tokens: int, at_least: int = 1) -> list[list[Batch]]:
    """Return [ranks][micro-batches]: one list of micro-batches for each data-parallel rank, all of the same length.

    A unit is `batch.unit` neighbouring sequences, which stay in one micro-batch. Units that start with the same prompt
    stay together where they fit, so that the prompt is computed once. The longest units go first, each into the
    micro-batch with the fewest tokens, so that ranks compute about the same number of tokens. A micro-batch that no
    unit is left for gets the shortest unit with its mask cleared: its rank takes part in every collective, and the loss
    does not change.

    Args:
        ranks: number of data-parallel ranks.
        max_tokens: maximum tokens of one micro-batch; tokens of a shared prompt count once.
        at_least: minimum number of micro-batches for each rank.

    Raises:
        ValueError: a unit is longer than `max_tokens`.
    """
    lengths = batch.lengths.reshape(-1, batch.unit).sum(1)
    longest = int(lengths.max())
    if longest > max_tokens:
        subject = "a sequence" if batch.unit == 1 else f"{batch.unit} sequences that belong together, in all"
        raise ValueError(
            f"{subject} of {longest} tokens is longer than training.seq_len = {max_tokens}: raise it, or shorten the "
            "sequence"
        )

    # The units of each prompt; its key is the first run of their tokens in the tree.
    tree = find_prefixes(prefix_ids(batch), batch.lengths)
    by_prompt: dict[int, list[int]] = {}
    for unit in range(len(lengths)):
        by_prompt.setdefault(tree.root(unit * batch.unit), []).append(unit)

    # As few micro-batches as the units fit into.
    per_rank = max(at_least, math.ceil(len(tree.source) / (ranks * max_tokens)))
    while (bins := _fill_bins(batch, tree, list(by_prompt.values()), ranks * per_rank, max_tokens)) is None:
        per_rank += 1

    micro_batches = []
    for units in bins:
        selected = np.array(sorted(units) or [int(lengths.argmin())])
        micro_batch = batch.select((selected[:, None] * batch.unit + np.arange(batch.unit)).ravel())
        # An empty micro-batch holds a unit that is not trained, with which its rank takes part in the collectives.
        if not units:
            micro_batch.mask = np.zeros_like(micro_batch.mask)
            micro_batch.weights = np.zeros_like(micro_batch.weights)
        micro_batches.append(micro_batch)

    return [micro_batches[rank::ranks] for rank in range(ranks)]


def _loss_shares(episodes: Sequence[Episode], counts: np.ndarray, aggregation: str, horizon: int | None) -> np.ndarray:
    """Return [episodes], the share of the loss that each trained token of an episode has.

    Args:
        counts: [episodes], numbers of trained tokens.
    """
    if (aggregation == "fixed_horizon") != (horizon is not None and horizon > 0):
        raise ValueError(
            "horizon must be at least 1 with aggregation fixed_horizon and None with any other, got aggregation "
            f"{aggregation} and horizon {horizon}"
        )

    # In float64: shares of thousands of tokens add up to 1.
    weights = np.array([episode.weight for episode in episodes], np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise ValueError("episode weights must be finite and at least 0, and at least one must be above 0")

    if aggregation == "token_mean":
        return weights / ((weights * counts).sum() or 1.0)
    if aggregation == "sequence_mean":
        return weights / weights.sum() / np.maximum(1, counts)
    if horizon is not None:
        return weights / (len(episodes) * horizon)
    raise ValueError(f"unknown aggregation {aggregation!r}: use token_mean, sequence_mean or fixed_horizon")


def _rewards_of_tokens(episodes: Sequence[Episode]) -> np.ndarray | None:
    """Return [tokens], rewards at the tokens that earned them; None if an episode or a branch has no reward.

    A turn's or a step's reward is at its last token. What else its branch earned is at the branch's last trained token.
    """
    branch_rows: list[np.ndarray] = []
    for episode in episodes:
        branches = (*episode.branches, episode)
        rewards = [branch.reward for branch in branches if branch.reward is not None]
        if len(rewards) < len(branches):
            return None

        # The reward of a branch includes the rewards of the branches after it, so its own part is the difference.
        for branch, unplaced in zip(branches, -np.diff([*rewards, 0.0]), strict=True):
            token_rewards = np.zeros(len(branch.tokens), np.float32)
            turn_rewards = ((turn.end, turn.reward) for turn in branch.turns)
            for end, reward in (*turn_rewards, *branch.steps):
                token_rewards[end - 1] += reward
                unplaced -= reward
            if any(branch.mask):
                last_trained = max(position for position, trained in enumerate(branch.mask) if trained)
                token_rewards[last_trained] += unplaced
            branch_rows.append(token_rewards)

    return np.concatenate(branch_rows)


def _experts_of_tokens(episodes: Sequence[Episode]) -> np.ndarray | None:
    """Return [tokens, layers, k], the k experts that each layer chose for a token, UNKNOWN_EXPERT for episodes without
    a record; None if no episode has one."""
    shape = next((episode.experts.shape[1:] for episode in episodes if episode.experts is not None), None)
    if shape is None:
        return None

    episode_rows: list[np.ndarray] = []
    for index, episode in enumerate(episodes):
        expected = (len(episode.tokens), *shape)
        experts = np.full(expected, UNKNOWN_EXPERT, np.uint8) if episode.experts is None else episode.experts
        if experts.shape != expected:
            raise ValueError(
                f"episode {index} has {len(episode.tokens)} tokens, but its recorded experts have shape {experts.shape}"
            )
        episode_rows.append(experts)
    return np.concatenate(episode_rows)


def _fill_bins(
    batch: Batch, tree: PrefixTree, by_prompt: list[list[int]], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Distribute units over `count` bins of at most `max_tokens` tokens, and return the units of each; None if they do
    not fit.

    Args:
        tree: of the batch's sequences.
        by_prompt: the units of each prompt. They stay together, unless they exceed a bin's fair share: then they are
            halved until they do not.
    """

    # Halve the units of a prompt until they fit, so that its tokens are repeated as rarely as possible.
    fair_share = min(max_tokens, math.ceil(len(tree.source) / count))
    chunks: list[tuple[int, list[int]]] = []
    pending = by_prompt[::-1]
    while pending:
        units = pending.pop()
        tokens = tree.cost(unit * batch.unit + i for unit in units for i in range(batch.unit))
        half = len(units) // 2
        if tokens > fair_share and half:
            pending += [units[half:], units[:half]]
        else:
            chunks.append((tokens, units))

    # The longest first, each into the lightest bin.
    bins: list[list[int]] = [[] for _ in range(count)]
    bin_tokens = [0] * count
    for tokens, units in sorted(chunks, key=lambda chunk: -chunk[0]):
        lightest = bin_tokens.index(min(bin_tokens))
        bin_tokens[lightest] += tokens
        if bin_tokens[lightest] > max_tokens:
            return None
        bins[lightest] += units

    return bins
