"""The record of a closed session, and its conversion to an episode that trains each sampled token at most once."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from forge.types import Episode
from forge_envs.rollout import Branch

from .tree import TokenRun, TokenTree

# Why tokens are not trained:
# - orphan: no client has received the turn;
# - auxiliary: a call outside the task, such as for a title;
# - constrained: sampled under a grammar;
# - surplus: sampled after a stop string;
# - unscored: the episode has no reward, which is known only once it has ended.
EXCLUSIONS = ("orphan", "auxiliary", "constrained", "surplus", "unscored")


class Certificate(Counter[str]):
    """Token counts of a session: "sampled", "trained", and the reasons in `EXCLUSIONS` for tokens that are not trained.

    Every sampled token is trained once or excluded for one reason:
    sampled = trained + orphan + auxiliary + constrained + surplus + unscored
    """

    def check(self) -> None:
        """Raise AssertionError if the counts do not add up: some tokens were lost or counted twice."""
        excluded = sum(self[name] for name in EXCLUSIONS)
        if self["sampled"] != self["trained"] + excluded:
            parts = ", ".join(f"{name} {self[name]}" for name in ("trained", *EXCLUSIONS))
            raise AssertionError(f"{self['sampled']} sampled tokens are not {parts}: some were lost or counted twice")

    def without_training(self, reason: str) -> Self:
        """Return a copy of the counts in which the trained tokens are excluded for a reason instead.

        >>> Certificate(sampled=5, trained=5).without_training("unscored") == {"sampled": 5, "unscored": 5}
        True
        """
        certificate = type(self)(self)
        certificate[reason] += certificate.pop("trained", 0)
        return certificate


Auxiliary = Literal["drop", "train"]


@dataclass(frozen=True)
class SessionRecord:
    """The record of a closed session.

    runs: the turns of each policy.
    delivered: the ids of the turns that a client has received.
    counts: "requests"; "cancelled" generations; "limited", empty answers at a limit of the session; "max_turns" and
        "max_tokens", answers that these limits made empty or cut; and for each policy "surplus/NAME", the tokens that
        were sampled after a stop string.
    """

    runs: Mapping[str, Sequence[TokenRun]]
    delivered: frozenset[str]
    counts: Mapping[str, int] = field(default_factory=dict)

    def tree(self, policy: str) -> TokenTree:
        """Return the tree of one policy's turns; an empty one if it has none."""
        tree = TokenTree()
        for run in self.runs.get(policy, ()):
            tree.add(run)
        return tree

    def episode(
        self, policy: str, reward: float | None, *, auxiliary: Auxiliary = "drop", info: Mapping[str, Any] | None = None
    ) -> Episode | None:
        """Return the turns of one policy as an episode, which has a branch for each leaf of their tree.

        Args:
            reward: the outcome of all branches; None: the episode was not scored.
            auxiliary: whether calls outside the task, such as for titles, are trained ("train") or not ("drop").
            info: for the episode's `info`, to which "certificate" and counts of turns and calls are added.

        Returns:
            The last branch, which has the earlier ones as its `branches`. A turn that several branches share is trained
            in the first of them, and context in the others. None: no turn is to be trained; `unlearned` counts them.

        Raises:
            AssertionError: the counts of tokens do not add up.
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

            branch = Branch()
            for run in path:
                branch.observe(run.context)
                branch.append_turn(run.completion, is_trained=run.number in new_turns)
            branches.append(branch.episode(reward))

        certificate = self._count_account(policy, reasons, trained)
        if not branches:
            return None

        *earlier, last = branches
        last.branches = tuple(earlier)
        parts = []
        for run in tree.runs:
            if run.reason and run.number:
                parts.append(f"[new branch: {run.reason}]")
            for message in run.added:
                calls = "".join(f" {call.name}({call.arguments})" for call in message.get("calls", ()))
                parts.append(f"[{message['role']}] {message['content']}{calls}")
        last.text = "\n".join(parts)
        last.info = {
            **(info or {}),
            "turns": len(tree.runs),
            "calls": sum(len(run.added[-1].get("calls", ())) for run in tree.runs),
            "unread_calls": 0,
            "messages": tree.conversation(tree.runs[-1]) if tree.runs else [],
            "roots": dict(Counter(run.reason for run in tree.runs if run.reason)),
            "requests": dict(self.counts),
            "certificate": dict(certificate),
        }
        for episode in earlier:
            episode.info = dict(last.info)
        return last

    def unlearned(self, policy: str, auxiliary: Auxiliary = "drop") -> Certificate:
        """Return the token counts of a session without an episode, in which tokens to train count as "unscored".

        Raises:
            AssertionError: the counts do not add up.
        """
        reasons = self.exclusions(policy, auxiliary)
        trained = sum(len(run.completion.token_ids) for run in self.runs.get(policy, ()) if run.number not in reasons)
        return self._count_account(policy, reasons, trained).without_training("unscored")

    def exclusions(self, policy: str, auxiliary: Auxiliary = "drop") -> dict[int, str]:
        """Return the turns of a policy that are not trained: each turn's number with its reason from `EXCLUSIONS`."""
        tree = self.tree(policy)
        reasons: dict[int, str] = {}
        # A turn that another one continues has been received by the client, even if that is not recorded.
        continued = {run.parent for run in tree.runs}
        for run in tree.runs:
            if run.id not in self.delivered and run.number not in continued:
                reasons[run.number] = "orphan"
            elif run.is_constrained:
                reasons[run.number] = "constrained"
        if auxiliary == "drop":
            for run in auxiliary_runs(tree):
                reasons.setdefault(run.number, "auxiliary")
        return reasons

    def _count_account(self, policy: str, reasons: Mapping[int, str], trained: int) -> Certificate:
        """Return the token counts of a policy, given the number `trained` of trained tokens.

        Args:
            reasons: why turns are not trained, by their numbers.

        Raises:
            AssertionError: the counts do not add up.
        """
        account = Certificate(trained=trained)
        for run in self.runs.get(policy, ()):
            size = len(run.completion.token_ids)
            account["sampled"] += size
            if run.number in reasons:
                account[reasons[run.number]] += size
        surplus = self.counts.get(f"surplus/{policy}", 0)
        account.update(sampled=surplus, surplus=surplus)
        account.check()
        return account


def auxiliary_runs(tree: TokenTree) -> Iterator[TokenRun]:
    """Yield the turns that an agent requested outside its task, such as for a title or a summary.

    They are recognised by their requests: without tools, where other requests of the session have tools, and neither
    continuing a turn nor continued by one. The session's last turn is not auxiliary if its request has earlier turns in
    its history: some agents ask for their final answer without tools.
    """
    if not any(run.tools for run in tree.runs):
        return
    continued = {run.parent for run in tree.runs}
    for run in tree.runs:
        has_history = any(message["role"] == "assistant" for message in run.added[:-1])
        is_final_answer = run is tree.runs[-1] and has_history
        if run.parent is None and not run.tools and run.number not in continued and not is_final_answer:
            yield run
