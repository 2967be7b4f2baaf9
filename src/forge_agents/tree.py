"""The tokens that one policy read and sampled in a session, as a tree of turns whose tokens never change.

A request continues the turn with which its history ends, and adds only the tokens of its new messages. A request that
continues no turn starts a root. Two requests that continue the same turn are siblings.

A turn is found by a key, a digest of its conversation that ignores what clients change when they send a history back:
the order of the keys of arguments, white space, thoughts and ids.
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
    """Return the key of a request's tools; the same for any order of them."""
    return _digest_parts(*sorted(json.dumps(tool, sort_keys=True) for tool in tools))


def message_key(message: Message) -> bytes:
    """Return the key of a message, which does not depend on its thought, its ids and its white space."""
    if message["role"] != "assistant":
        return _digest_parts(message["role"], collapse_spaces(message["content"]))
    calls = [f"{call.name} {_normal_arguments(call.arguments)}" for call in message.get("calls", ())]
    return _digest_parts("assistant", collapse_spaces(message["content"]), *calls)


def conversation_key(start: bytes, messages: Iterable[Message]) -> bytes:
    """Return the key of a conversation.

    Args:
        start: the key of what precedes the messages: of the tools, or of the turn that is continued.
    """
    key = start
    for message in messages:
        key = _digest_parts(key.hex(), message_key(message).hex())
    return key


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
    # Each part is preceded by its length, so that ("ab", "c") and ("a", "bc") have different digests.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


# Why a request starts a root. "start": its conversation is new; "edited": its history is none that was sampled;
# "thoughts_dropped": the template renders the sampled history without its thoughts. "": it continues a turn.
Reason = Literal["", "start", "edited", "thoughts_dropped"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """One turn of the policy, with the context tokens between its parent and itself.

    number: its index in the tree's `runs`.
    parent: the number of the turn that it continues; None: it is a root.
    context: the tokens that the policy read after the parent's last token; for a root, the whole prompt.
    completion: the tokens that it sampled.
    added: the messages of `context`, then the turn itself as a message.
    tools: the tools that its request offered.
    key: the key of the conversation up to this turn, which is included.
    id: the id of the answer that the client got.
    reason: why it is a root; "": it continues its parent.
    is_constrained: whether it was sampled under a grammar, and so from a distribution other than the policy's.
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
    """Position of a request in the token tree.

    parent: the turn that it continues; None: it starts a root.
    messages: the messages after the parent; for a root, all messages.
    reason: why it starts a root.
    """

    parent: TokenRun | None
    messages: tuple[Message, ...]
    reason: Reason = ""


class TokenTree:
    """The turns of one policy in one session, in the order in which they ended.

    Args:
        restores_thoughts: if a request starts a root with a history that repeats a sampled turn without its thought,
            add the thought to it.
    """

    def __init__(self, *, restores_thoughts: bool = True) -> None:
        self.runs: list[TokenRun] = []
        self._restores_thoughts = restores_thoughts
        self._by_key: dict[bytes, list[TokenRun]] = {}
        self._by_id: dict[str, TokenRun] = {}

    def add(self, run: TokenRun) -> None:
        """Append a complete turn, and index it by its key, its id and the ids of its calls."""
        self.runs.append(run)
        self._by_key.setdefault(run.key, []).append(run)
        self._by_id |= dict.fromkeys((run.id, *(call.id for call in run.added[-1].get("calls", ()))), run)

    def path(self, run: TokenRun) -> list[TokenRun]:
        """Return the runs from the root to this one."""
        runs = [run]
        while (parent := runs[-1].parent) is not None:
            runs.append(self.runs[parent])
        return runs[::-1]

    def tokens(self, run: TokenRun) -> list[int]:
        """Return all tokens of the path from the root to this turn."""
        return [token for step in self.path(run) for token in (*step.context, *step.completion.token_ids)]

    def conversation(self, run: TokenRun) -> list[Message]:
        """Return all messages of the path from the root to this turn."""
        return [message for step in self.path(run) for message in step.added]

    def place(self, request: ModelRequest) -> Place:
        """Find the turn that a request continues: by its response id if it names one, otherwise by its message history.

        Raises:
            KeyError: no turn has the id.
        """
        messages = request.messages
        if request.previous:
            return Place(self._by_id[request.previous], messages)

        # The history ends with the assistant's last message; the messages after it are new.
        turn_ends = [index for index, message in enumerate(messages, 1) if message["role"] == "assistant"]
        history_end = turn_ends[-1] if turn_ends else 0
        history, new_messages = messages[:history_end], messages[history_end:]
        if history and new_messages:
            key = conversation_key(tools_key(request.tools), history)
            candidates = [run for run in self._by_key.get(key, ()) if self._keeps_thoughts(run, history)]
            if candidates:
                # Of turns with the same text the latest one with a call id that the client sends back, else the latest.
                sent_ids = {call.id for call in history[-1].get("calls", ())}
                with_sent_ids = [
                    run for run in candidates if any(call.id in sent_ids for call in run.added[-1].get("calls", ()))
                ]
                return Place((with_sent_ids or candidates)[-1], new_messages)

        if self._restores_thoughts:
            messages = tuple(self._with_thought(message) for message in messages)
        return Place(None, messages, "edited" if history and self.runs else "start")

    def _with_thought(self, message: Message) -> Message:
        """Return a message with the thought of the latest sampled turn that has the same text, if there is one."""
        if message["role"] != "assistant" or message.get("thought"):
            return message
        key = message_key(message)
        for run in reversed(self.runs):
            turn = run.added[-1]
            if turn.get("thought") and message_key(turn) == key:
                return {**message, "thought": turn["thought"]}
        return message

    def _keeps_thoughts(self, run: TokenRun, history: Sequence[Message]) -> bool:
        """Return whether each thought in a history is the sampled one, or omitted by the client."""
        return all(
            not sent.get("thought") or collapse_spaces(sent["thought"]) == collapse_spaces(sampled.get("thought", ""))
            for sampled, sent in zip(self.conversation(run), history, strict=True)
        )
