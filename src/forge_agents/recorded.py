"""Conversations that a server has recorded, as rows of exact tokens.

A recording is a folder of `forge serve --record`: `recording.json` names the model, each `traffic-*.jsonl` has a line
for each event of one server. A turn's line has the tokens that came after its parent's, and those that were sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge.data.files import Row

RECORDING = "recording.json"
TRAFFIC = "traffic-*.jsonl"
Place = tuple[int | None, tuple[int, ...]]  # the turn before an answer, and the tokens between


@dataclass
class RecordedTurn:
    """One answer: the tokens that the model read after its parent's, and those that it sampled."""

    id: str
    parent: int | None
    context: list[int]
    sampled: list[int]
    is_delivered: bool = False
    children: list[int] = field(default_factory=list)  # the turns that continue it


def vocabulary_digest(tokenizer: Any) -> str:
    """A digest that two tokenizers share if ids mean the same tokens in both."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def recorded_rows(path: str, kind: Literal["prompts", "supervised", "preferences"], tokenizer: Any) -> list[Row]:
    """The conversations of a recording, for `preferences` its pairs.

    A conversation has `token_ids`, and in `trained` whether each was sampled: each answer is trained in one row. Left
    out are answers that no client received, and those that another one was preferred to. A pair has `prompt_ids`,
    `chosen_ids` and `rejected_ids`: two answers to the same tokens, of which one alone was continued.

    Raises:
        ValueError: other tokens, a damaged line, or nothing of this kind.
    """
    folder = Path(path).expanduser()
    if kind == "prompts":
        raise ValueError(f"{path} is recorded traffic, which has answers and no targets: train it by SFT or DPO")
    written = json.loads((folder / RECORDING).read_text())
    if written["tokenizer"] != vocabulary_digest(tokenizer):
        raise ValueError(
            f"{path} was recorded from {written['model']}, whose tokenizer is another one: train that model"
        )
    rows: list[Row] = []
    for turns in _sessions(folder):
        rows += _pairs(turns) if kind == "preferences" else _conversations(turns)
    if not rows:
        wanted = "a request that was answered twice, and one answer continued" if kind == "preferences" else "an answer"
        raise ValueError(f"{path} has no {kind} rows: it needs {wanted}")
    return rows


def _sessions(folder: Path) -> Iterator[list[RecordedTurn]]:
    """The turns of each session."""
    for file in sorted(folder.glob(TRAFFIC)):
        sessions: dict[str, list[RecordedTurn]] = {}
        received: set[str] = set()
        # What follows the last line break was cut by a death, or is being written.
        for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
            try:
                event = json.loads(line)
                if event["kind"] == "turn":
                    _add(sessions.setdefault(event["session"], []), event)
                elif event["kind"] == "delivered":
                    received.update(event["ids"])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ValueError(f"{file}, line {number} is damaged: {type(error).__name__}: {error}") from None
        for turns in sessions.values():
            for turn in turns:
                # A client that continues an answer has received it.
                turn.is_delivered = turn.id in received or bool(turn.children)
            yield turns


def _add(turns: list[RecordedTurn], event: Mapping[str, Any]) -> None:
    if event["number"] != len(turns):
        raise ValueError(f"turn {len(turns)} of its session is missing")
    if event["parent"] is not None:
        turns[event["parent"]].children.append(len(turns))
    turns.append(RecordedTurn(event["id"], event["parent"], event["context"], event["sampled"]))


def _winners(turns: Sequence[RecordedTurn]) -> dict[int, int]:
    """By each received answer the one that was preferred to it: another to the same context, alone continued."""
    answers: dict[Place, list[int]] = {}
    for number, turn in enumerate(turns):
        if turn.is_delivered:
            answers.setdefault((turn.parent, tuple(turn.context)), []).append(number)
    winners = {}
    for numbers in answers.values():
        continued = [number for number in numbers if turns[number].children]
        if len(continued) == 1:
            winners |= {number: continued[0] for number in numbers if number != continued[0]}
    return winners


def _pairs(turns: Sequence[RecordedTurn]) -> Iterator[Row]:
    for number, winner in _winners(turns).items():
        turn = turns[number]
        earlier = [turns[step] for step in _path(turns, number)[:-1]]
        prompt = [token for step in earlier for token in [*step.context, *step.sampled]]
        chosen, rejected = turns[winner].sampled, turn.sampled
        yield {"prompt_ids": [*prompt, *turn.context], "chosen_ids": chosen, "rejected_ids": rejected}


def _conversations(turns: Sequence[RecordedTurn]) -> Iterator[Row]:
    winners = _winners(turns)
    trained = {n for n, turn in enumerate(turns) if turn.is_delivered and n not in winners and turn.sampled}
    covered: set[int] = set()
    for number in sorted(trained):
        if any(child in trained for child in turns[number].children):
            continue
        token_ids: list[int] = []
        mask: list[bool] = []
        for step in _path(turns, number):
            turn = turns[step]
            token_ids += [*turn.context, *turn.sampled]
            # An answer that several conversations go through is trained in the first of them.
            is_new = step in trained and step not in covered
            mask += [False] * len(turn.context) + [is_new] * len(turn.sampled)
            covered.add(step)
        yield {"token_ids": token_ids, "trained": mask}


def _path(turns: Sequence[RecordedTurn], number: int) -> list[int]:
    """The turns from a conversation's first to this one."""
    numbers = [number]
    while (parent := turns[numbers[-1]].parent) is not None:
        numbers.append(parent)
    return numbers[::-1]
