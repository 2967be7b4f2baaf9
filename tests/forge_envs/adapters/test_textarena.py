"""Games of TextArena: for one, and for two with an opponent."""

import asyncio
import random

import pytest

from forge_envs import Action

pytest.importorskip("textarena")
from forge_envs.textarena import TextArenaEnvironment


def turn(text):
    return Action(text, text)


def test_concurrent_textarena_games_have_separate_random_state():
    async def main():
        envs = [TextArenaEnvironment("2048-v0") for _ in range(3)]
        boards = [[(await env.reset(None, seed=1)).messages[0]["content"]] for env in envs]
        for move in ("[up]", "[left]", "[down]"):
            for env, seen in zip(envs, boards, strict=True):
                random.random()
                seen += [message["content"] for message in (await env.step(turn(move))).messages]
        return boards

    random.seed(4)
    before = random.getstate()
    expected = [random.random() for _ in range(9)][-1]
    random.setstate(before)
    first, *others = asyncio.run(main())
    assert all(board == first for board in others)
    random.setstate(before)
    assert [random.random() for _ in range(9)][-1] == expected


def test_textarena_opponent_plays_other_seat():
    heard = []

    def opponent(text):
        heard.append(text)
        return f"[{[7, 8][len(heard) - 1]}]"

    async def main():
        env = TextArenaEnvironment("TicTacToe-v0", players=2, opponent=opponent)
        first = await env.reset(None, seed=1)
        return [first, *[await env.step(turn(move)) for move in ("0", "[1]", "2")]]

    first, second, _, last = asyncio.run(main())
    assert "You are Player 0 in Tic Tac Toe" in first.messages[0]["content"]
    assert "Player 1 placed their symbol" in second.messages[0]["content"]
    assert "You are Player 1" in heard[0]
    assert heard[1].startswith(heard[0])
    assert (last.reward, last.terminated) == (1.0, True)


def test_unknown_textarena_game_raises():
    with pytest.raises(ValueError, match="no game 'Nothing-v0'"):
        TextArenaEnvironment("Nothing-v0")
    with pytest.raises(ValueError, match="needs an opponent"):
        TextArenaEnvironment("TicTacToe-v0", players=2)
