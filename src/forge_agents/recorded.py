"""Conversations that a server has recorded, as rows of exact tokens.

A recording is a folder of `forge serve --record`: `recording.json` names the model, each `traffic-*.jsonl` has a line
for each event of one server. A turn's line has the tokens that came after its parent's, and those that were sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from forge.data.files import Row
from forge.types import Completion

from .record import SessionRecord
from .tree import TokenRun

RECORDING = "recording.json"
TRAFFIC = "traffic-*.jsonl"
MODEL = "model"  # whose turns a session has


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
    for runs, received in _sessions(folder):
        winners = _winners(runs, received)
        # What another answer was preferred to is no more trained than what no client received.
        record = SessionRecord({MODEL: runs}, frozenset(received - {runs[loser].id for loser in winners}))
        if kind == "preferences":
            rows += _pairs(record, winners)
        elif (episode := record.episode(MODEL, None)) is not None:
            branches = (*episode.branches, episode)
            rows += [{"token_ids": branch.tokens, "trained": branch.mask} for branch in branches]
    if not rows:
        wanted = "a request that was answered twice, and one answer continued" if kind == "preferences" else "an answer"
        raise ValueError(f"{path} has no {kind} rows: it needs {wanted}")
    return rows


def _sessions(folder: Path) -> Iterator[tuple[list[TokenRun], set[str]]]:
    """The turns of each session, and the ids of those that a client has received."""
    for file in sorted(folder.glob(TRAFFIC)):
        sessions: dict[str, list[TokenRun]] = {}
        received: set[str] = set()
        # What follows the last line break was cut by a death, or is being written.
        for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
            try:
                event = json.loads(line)
                if event["kind"] == "turn":
                    runs = sessions.setdefault(event["session"], [])
                    runs.append(_run(event, len(runs)))
                elif event["kind"] == "delivered":
                    received.update(event["ids"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number} is damaged: {type(error).__name__}: {error}") from None
        for runs in sessions.values():
            # A client that continues an answer has received it.
            yield runs, received | {runs[run.parent].id for run in runs if run.parent is not None}


def _run(event: Row, number: int) -> TokenRun:
    if event["number"] != number:
        raise ValueError(f"turn {number} of its session is missing")
    size = len(event["sampled"])
    turn = Completion("", event["sampled"], [0.0] * size, versions=[0] * size)
    added = ({"role": "assistant", "content": ""},)
    return TokenRun(number, event["parent"], tuple(event["context"]), turn, added, (), b"", event["id"])


def _winners(runs: list[TokenRun], received: set[str]) -> dict[int, int]:
    """By each received answer the one that was preferred to it: another to the same context, alone continued."""
    parents = {run.parent for run in runs if run.parent is not None}
    answers: dict[tuple[int | None, tuple[int, ...]], list[int]] = {}
    for run in runs:
        if run.id in received:
            answers.setdefault((run.parent, run.context), []).append(run.number)
    winners: dict[int, int] = {}
    for numbers in answers.values():
        continued = parents.intersection(numbers)
        if len(continued) == 1:
            winners |= {number: min(continued) for number in numbers if number not in continued}
    return winners


def _pairs(record: SessionRecord, winners: dict[int, int]) -> Iterator[Row]:
    tree = record.tree(MODEL)
    for loser, winner in winners.items():
        run = tree.runs[loser]
        prompt = [*([] if run.parent is None else tree.tokens(tree.runs[run.parent])), *run.context]
        chosen = tree.runs[winner].completion.token_ids
        yield {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": run.completion.token_ids}
