"""The record of a session, and the episode that it becomes: all branches of its tree, each sampled token in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from forge.types import Episode, Origin, Turn

from .tree import TokenRun, TokenTree

# Why the tokens of a turn are not trained. The last is known only once the episode has ended.
EXCLUSIONS = ("orphan", "auxiliary", "constrained", "surplus", "unscored")


class Certificate(Counter[str]):
    """Account for every sampled token: it was trained once, or there is a named reason why not.

    sampled = trained + orphan + auxiliary + constrained + surplus + unscored
    """

    def check(self) -> None:
        """Raise AssertionError if the counts do not add up: tokens were lost or doubled."""
        excluded = sum(self[name] for name in EXCLUSIONS)
        if self["sampled"] != self["trained"] + excluded:
            parts = ", ".join(f"{name} {self[name]}" for name in ("trained", *EXCLUSIONS))
            raise AssertionError(f"{self['sampled']} sampled tokens are not {parts}: some were lost or counted twice")

    def without_training(self, reason: str) -> Certificate:
        """Return the account of an episode that is not trained after all."""
        moved = Certificate(self)
        moved[reason] += moved.pop("trained", 0)
        return moved


Auxiliary = Literal["drop", "train"]


@dataclass(frozen=True)
class SessionRecord:
    """A closed session: the runs of each policy, the ids of delivered turns, and counts.

    counts: "requests", "cancelled", "limited", and by policy "surplus/...", tokens after a stop string.
    """

    runs: Mapping[str, Sequence[TokenRun]]
    delivered: frozenset[str]
    counts: Mapping[str, int] = field(default_factory=dict)

    def tree(self, policy: str) -> TokenTree:
        """Return the tree of one policy's turns."""
        tree = TokenTree()
        for run in self.runs.get(policy, ()):
            tree.add(run)
        return tree

    def episode(
        self, policy: str, reward: float | None, *, auxiliary: Auxiliary = "drop", info: Mapping[str, Any] | None = None
    ) -> Episode | None:
        """Return the turns of one policy as an episode: a branch for each leaf, which all have the outcome `reward`. A
        turn that several branches share is trained in the first of them and context in the others.

        Args:
            auxiliary: whether calls alongside the task, such as for titles, are trained.
            info: of the episode; "certificate" is added.

        Returns:
            None if no turn is to be trained: `unlearned` has the account then.

        Raises:
            AssertionError: the account of tokens does not add up.
        """
        tree = self.tree(policy)
        reasons = self.exclusions(policy, auxiliary)

        # A leaf is a trained turn below which no other turn is trained.
        paths = [tree.path(run) for run in tree.runs if run.number not in reasons]
        inner_turns = {run.number for path in paths for run in path[:-1]}
        leaf_paths = [path for path in paths if path[-1].number not in inner_turns]

        branches: list[Episode] = []
        covered: set[int] = set()
        trained = 0
        for path in leaf_paths:
            new_turns = {run.number for run in path} - reasons.keys() - covered
            covered |= new_turns
            trained += sum(len(run.completion.token_ids) for run in path if run.number in new_turns)
            branches.append(_branch_episode(path, new_turns, reward))

        certificate = self._count_account(policy, reasons, trained)
        certificate.check()
        if not branches:
            return None

        # The last branch stands for the episode, and has the others.
        *earlier, last = branches
        last.branches = tuple(earlier)
        last.text = format_transcript(tree)
        last.info = {**(info or {}), **self._episode_numbers(tree), "certificate": dict(certificate)}
        for branch in earlier:
            branch.info = dict(last.info)
        return last

    def unlearned(self, policy: str, auxiliary: Auxiliary = "drop") -> Certificate:
        """Return the account of a session that becomes no episode, whose trainable tokens are unscored."""
        reasons = self.exclusions(policy, auxiliary)
        trained = sum(len(run.completion.token_ids) for run in self.runs.get(policy, ()) if run.number not in reasons)
        account = self._count_account(policy, reasons, trained).without_training("unscored")
        account.check()
        return account

    def exclusions(self, policy: str, auxiliary: Auxiliary = "drop") -> dict[int, str]:
        """Return why turns are not trained, by their numbers."""
        tree = self.tree(policy)
        reasons: dict[int, str] = {}
        for run in tree.runs:
            if run.id not in self.delivered and not tree.is_continued(run):
                reasons[run.number] = "orphan"
            elif run.is_constrained:
                reasons[run.number] = "constrained"
        if auxiliary == "drop":
            for run in auxiliary_runs(tree):
                reasons.setdefault(run.number, "auxiliary")
        return reasons

    def _count_account(self, policy: str, reasons: Mapping[int, str], trained: int) -> Certificate:
        account = Certificate(trained=trained)
        for run in self.runs.get(policy, ()):
            size = len(run.completion.token_ids)
            account["sampled"] += size
            if run.number in reasons:
                account[reasons[run.number]] += size
        surplus = self.counts.get(f"surplus/{policy}", 0)
        account["sampled"] += surplus
        account["surplus"] += surplus
        return account

    def _episode_numbers(self, tree: TokenTree) -> dict[str, Any]:
        return {
            "turns": len(tree.runs),
            "calls": sum(len(run.added[-1].get("calls", ())) for run in tree.runs),
            "unread_calls": 0,
            "messages": tree.conversation(tree.runs[-1]) if tree.runs else [],
            "roots": dict(Counter(run.reason for run in tree.runs if run.reason)),
            "requests": dict(self.counts),
        }


def auxiliary_runs(tree: TokenTree) -> Iterator[TokenRun]:
    """Yield calls outside the task, such as for a title or a summary: turns without tools that nothing continues, where
    other turns of the session have tools. The last turn is not auxiliary if its request has earlier turns: some agents
    ask for their final answer without tools."""
    if not any(run.tools for run in tree.runs):
        return
    for run in tree.runs:
        has_history = any(message["role"] == "assistant" for message in run.added[:-1])
        is_final_answer = run is tree.runs[-1] and has_history
        if run.parent is None and not run.tools and not tree.is_continued(run) and not is_final_answer:
            yield run


def format_transcript(tree: TokenTree) -> str:
    """Return the conversations of a tree as text, for people."""
    parts = []
    for run in tree.runs:
        if run.reason and run.number:
            parts.append(f"[new branch: {run.reason}]")
        for message in run.added:
            calls = "".join(f" {call.name}({call.arguments})" for call in message.get("calls", ()))
            parts.append(f"[{message['role']}] {message['content']}{calls}")
    return "\n".join(parts)


def _branch_episode(path: Sequence[TokenRun], new: set[int], reward: float | None) -> Episode:
    """Return the runs of a path as an episode in which only the new ones are trained."""
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    turns: list[Turn] = []
    origins: set[Origin] = set()
    experts: np.ndarray | None = None

    for run in path:
        turn = run.completion
        ids = turn.token_ids
        tokens += [*run.context, *ids]
        is_new = run.number in new
        mask += [False] * len(run.context) + [is_new] * len(ids)
        logprobs += [0.0] * len(run.context) + (turn.logprobs if is_new else [0.0] * len(ids))
        versions += [-1] * len(run.context) + (turn.versions if is_new else [-1] * len(ids))
        if is_new:
            turns.append(Turn(len(mask) - len(ids), len(mask), turn.version, turn.finish))
            origins |= {Origin(v, turn.identities.get(v, ""), turn.sampled_by) for v in {*turn.versions}}

        if turn.experts is not None:
            recorded = turn.experts.copy()
            if experts is not None:  # all but the last token's, which is known only now
                recorded[: len(experts) - 1] = experts[:-1]
            experts = recorded

    return Episode.played(
        tokens, mask, logprobs, versions, turns=turns, reward=reward, origins=origins, experts=experts
    )
