"""What the policy read and sampled in one session: a tree of token runs that never change.

A request continues the turn that its history ends with, and adds only the tokens of its new messages. One that
continues no turn starts a root. Two that continue the same turn are siblings.

A turn is found by the key of its history, equal however a client has serialised it: clients reorder the keys of
arguments, change white space, drop thoughts and ids, and join the parts of a text.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from forge.types import Completion

from .messages import Message, ModelRequest, Schema


def tools_key(tools: Sequence[Schema]) -> bytes:
    """Return the key of the tools that a request offers, in any order."""
    return _digest_parts(*sorted(json.dumps(tool, sort_keys=True) for tool in tools))


def message_key(message: Message) -> bytes:
    """Return the key of a message without its thought and ids."""
    if message["role"] != "assistant":
        return _digest_parts(message["role"], collapse_spaces(message["content"]))
    calls = [f"{call.name} {_normal_arguments(call.arguments)}" for call in message.get("calls", ())]
    return _digest_parts("assistant", collapse_spaces(message["content"]), *calls)


def conversation_keys(start: bytes, messages: Iterable[Message]) -> list[bytes]:
    """Return the key of a conversation after each of its messages. `start` is the key of what came before: of the
    tools, or of an earlier turn."""
    keys = []
    key = start
    for message in messages:
        key = _digest_parts(key.hex(), message_key(message).hex())
        keys.append(key)
    return keys


def collapse_spaces(text: str) -> str:
    r"""Return a text with its white space made uniform.

    >>> collapse_spaces(" a\n b ")
    'a b'
    """
    return " ".join(text.split())


@lru_cache(1 << 12)
def _normal_arguments(text: str) -> str:
    """Return the arguments of a call in one spelling: `{"b":1, "a":2}` as `{"a": 2, "b": 1}`; other texts unchanged."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return collapse_spaces(text)


def _digest_parts(*parts: Any) -> bytes:
    # Each part with its length, so that two lists of parts never read as one.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


# Why a root starts: a new conversation, one that the client sent before with other words, or without its thoughts.
Reason = Literal["", "start", "edited", "thoughts_dropped"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """One turn of the policy, after the context between it and its parent.

    number: its place in the tree, from 0.
    parent: number of the turn that it continues; None: it is a root.
    context: the tokens after the parent's last one that the policy read; of a root the whole prompt.
    completion: what it sampled, without the prompt.
    added: the messages of `context`, and the turn as a message.
    tools: those that its request offered.
    key: of the conversation up to and with this turn.
    reason: why it starts a branch; "" where it continues its parent.
    is_constrained: drawn under a grammar, so from another distribution than the policy's.
    id: of the answer, and of each sibling's.
    """

    number: int
    parent: int | None
    context: tuple[int, ...]
    completion: Completion
    added: tuple[Message, ...]
    tools: tuple[Schema, ...]
    key: bytes
    id: str
    reason: Reason = ""
    is_constrained: bool = False


class Place(NamedTuple):
    """Where a request belongs in the tree.

    parent: the turn that it continues; None: it starts a root.
    messages: those to add after the parent, or all.
    """

    parent: TokenRun | None
    messages: tuple[Message, ...]
    reason: Reason = ""


class TokenTree:
    """The runs of one policy in one session, in the order in which their turns ended.

    Args:
        restores_thoughts: where a history that was not sampled repeats a turn without its thought, put it back.
    """

    def __init__(self, *, restores_thoughts: bool = True) -> None:
        self.runs: list[TokenRun] = []
        self._restores_thoughts = restores_thoughts
        self._by_key: dict[bytes, list[TokenRun]] = {}
        self._by_id: dict[str, TokenRun] = {}
        self._parents: set[int] = set()

    def add(self, run: TokenRun) -> None:
        """Append a run, which is complete."""
        self.runs.append(run)
        self._by_key.setdefault(run.key, []).append(run)
        self._by_id[run.id] = run
        for call in run.added[-1].get("calls", ()):
            self._by_id[call.id] = run
        if run.parent is not None:
            self._parents.add(run.parent)

    def is_continued(self, run: TokenRun) -> bool:
        """Return whether a later turn follows this one: its client has received it."""
        return run.number in self._parents

    def path(self, run: TokenRun) -> list[TokenRun]:
        """Return the runs from the root to this one."""
        runs = [run]
        while (parent := runs[-1].parent) is not None:
            runs.append(self.runs[parent])
        return runs[::-1]

    def tokens(self, run: TokenRun) -> list[int]:
        """Return all tokens of the path from the root to this turn."""
        tokens: list[int] = []
        for step in self.path(run):
            tokens += [*step.context, *step.completion.token_ids]
        return tokens

    def conversation(self, run: TokenRun) -> list[Message]:
        """Return all messages of the path from the root to this turn."""
        return [message for step in self.path(run) for message in step.added]

    def place(self, request: ModelRequest) -> Place:
        """Find the turn that a request continues: by its id, else by the history.

        Raises:
            KeyError: the request names a turn that is not here.
        """
        messages = request.messages
        if request.previous:
            return Place(self._by_id[request.previous], messages)

        # The history ends with the last turn: what comes after it is new.
        turn_ends = [index for index, message in enumerate(messages, 1) if message["role"] == "assistant"]
        history_end = turn_ends[-1] if turn_ends else 0
        history, new_messages = messages[:history_end], messages[history_end:]
        if history and new_messages:
            key = conversation_keys(tools_key(request.tools), history)[-1]
            candidates = [run for run in self._by_key.get(key, ()) if self._keeps_thoughts(run, history)]
            if candidates:
                return Place(self._choose_parent(candidates, history), new_messages)

        if self._restores_thoughts:
            messages = tuple(self._with_thought(message) for message in messages)
        return Place(None, messages, "edited" if history and self.runs else "start")

    def _choose_parent(self, candidates: list[TokenRun], history: Sequence[Message]) -> TokenRun:
        """Return the parent among turns that say the same: the one whose call ids the client sends back, else the
        latest."""
        ids = {call.id for call in history[-1].get("calls", ())}
        named = [run for run in candidates if ids & {call.id for call in run.added[-1].get("calls", ())}]
        return (named or candidates)[-1]

    def _with_thought(self, message: Message) -> Message:
        """Return a turn that a client repeats, with the thought that was sampled."""
        if message["role"] != "assistant" or message.get("thought"):
            return message
        key = message_key(message)
        for run in reversed(self.runs):
            turn = run.added[-1]
            if turn.get("thought") and message_key(turn) == key:
                return {**message, "thought": turn["thought"]}
        return message

    def _keeps_thoughts(self, run: TokenRun, history: Sequence[Message]) -> bool:
        """Return whether the thoughts that a client sends are those that were sampled; it may omit them."""
        pairs = zip(self.conversation(run), history, strict=True)
        thoughts = [(sampled.get("thought", ""), sent.get("thought", "")) for sampled, sent in pairs]
        return all(not sent or collapse_spaces(sent) == collapse_spaces(sampled) for sampled, sent in thoughts)
