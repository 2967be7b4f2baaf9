"""Games of two policies: each is a coroutine that asks the players by their names and returns a reward for each."""

from __future__ import annotations

import asyncio
from random import Random

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from apps.toys.nim import best
from forge.types import Sample

PLAYERS = ("policy", "rival")


async def nim(client: AsyncOpenAI, sample: Sample, evaluation: bool = False) -> dict[str, float]:
    """Take 1 to `most` from a heap in turn; who takes the last one wins, and who makes another move loses.

    An evaluation is against perfect play, from the side that can win: every one of the policy's moves must be right.
    """
    heap, most = map(int, sample.prompt.text.split("/"))
    can_win = bool(heap % (most + 1))
    begins = can_win if evaluation else Random(sample.prompt.index).random() < 0.5
    turn = 0 if begins else 1
    while heap:
        player = PLAYERS[turn]
        if evaluation and player == "rival":
            move = best(heap, most)
        else:
            move = _move(await ask(client, player, [{"role": "user", "content": f"{heap}/{most}"}]))
        if not 1 <= move <= min(most, heap):
            return _won_by(1 - turn)
        heap -= move
        turn = 1 - turn
    return _won_by(1 - turn)


VERDICT = {"name": "verdict", "strict": True, "schema": {"type": "string", "enum": ["A", "B"]}}


async def debate(client: AsyncOpenAI, sample: Sample, rounds: int = 2) -> dict[str, float]:
    """Argue for two answers in turn, and let the frozen model `judge` choose. It is asked twice, with the sides
    exchanged: a verdict that follows the place of an answer is a draw."""
    question = sample.prompt.text
    said: list[tuple[str, str]] = []
    for _ in range(rounds):
        for player in PLAYERS:
            messages = [{"role": "user", "content": f"{question}\n\n{transcript(said, player)}Your argument:"}]
            said.append((player, await ask(client, player, messages)))
    verdicts = await asyncio.gather(*(_verdict(client, question, said, first) for first in PLAYERS))
    policy = verdicts.count("policy") / len(verdicts)
    return {"policy": policy, "rival": 1.0 - policy}


async def ask(client: AsyncOpenAI, model: str, messages: list, **options: object) -> str:
    """The text that a model answers."""
    typed: list[ChatCompletionMessageParam] = messages
    reply = await client.chat.completions.create(model=model, messages=typed, **options)  # type: ignore[call-overload]
    return reply.choices[0].message.content or ""


def transcript(said: list[tuple[str, str]], first: str) -> str:
    """What was said, by A, who is the player `first`, and B."""
    return "".join(f"{'A' if player == first else 'B'}: {text}\n" for player, text in said)


async def _verdict(client: AsyncOpenAI, question: str, said: list[tuple[str, str]], first: str) -> str:
    """The player whom the judge chooses where `first` is A."""
    text = f"{question}\n\n{transcript(said, first)}\nWho is right?"
    format_ = {"type": "json_schema", "json_schema": VERDICT}
    answer = await ask(client, "judge", [{"role": "user", "content": text}], response_format=format_)
    chosen_first = "A" in answer
    return next(player for player in PLAYERS if (player == first) == chosen_first)


def _move(answer: str) -> int:
    return int(answer) if answer.isascii() and answer.isdigit() and len(answer) < 4 else 0


def _won_by(turn: int) -> dict[str, float]:
    return {player: float(number == turn) for number, player in enumerate(PLAYERS)}
