"""Games of two policies: each is a coroutine that asks the players by their names and returns a reward for each."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from forge.types import Sample

PLAYERS = ("policy", "rival")


async def auction(client: AsyncOpenAI, sample: Sample, evaluation: bool = False) -> dict[str, float]:
    """Bid for a price at the same time; who is closer to it without going beyond wins, and equal bids share.

    An evaluation asks the policy only, and earns the share of the price that it bids: 1 is the price itself.
    """
    price = int(sample.prompt.text)
    messages = [{"role": "user", "content": sample.prompt.text}]
    if evaluation:
        share = max(0, bid_of(await ask(client, "policy", messages), price)) / price
        return {"policy": share, "rival": 1.0 - share}
    answers = await asyncio.gather(*(ask(client, player, messages) for player in PLAYERS))
    bids = [bid_of(answer, price) for answer in answers]
    policy = 0.5 if bids[0] == bids[1] else float(bids[0] > bids[1])
    return {"policy": policy, "rival": 1.0 - policy}


def bid_of(answer: str, price: int) -> int:
    """The bid of an answer; -1 if it is none, or beyond the price."""
    bid = int(answer) if answer.isascii() and answer.isdigit() and len(answer) < 9 else -1
    return bid if bid <= price else -1


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
    verdict = await ask(client, "judge", [{"role": "user", "content": text}], response_format=format_)
    is_first = "A" in verdict
    return next(player for player in PLAYERS if (player == first) == is_first)
