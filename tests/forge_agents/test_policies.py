"""Turns whose generator dies while they are streamed."""

import asyncio

import pytest

from forge.actors.streams import StreamLost
from forge_agents.policies import Policy, sample_turns
from forge_envs.dialogue import Dialogue


def test_a_stream_that_is_lost_continues_from_its_tokens(forced_policy, bpe, monkeypatch):
    dialogue = Dialogue(bpe, "chatml")
    prompt = dialogue.initial([{"role": "user", "content": "hello"}])
    original = forced_policy._next
    reads = 0

    async def dying(stream):
        nonlocal reads
        reads += 1
        if reads == 2:
            raise StreamLost("the generator was lost")
        return await original(stream)

    monkeypatch.setattr(forced_policy.next_pieces, "route", dying)
    forced_policy.script = None
    sampling = {"n": 2, "max_tokens": 20, "stop_token_ids": dialogue.stop_ids, "seed": 5, "temperature": 1.0}

    async def collect():
        turns = {0: [], 1: []}
        ends = {}
        async for pieces in sample_turns(Policy(forced_policy, dialogue), "s", prompt, sampling, streamed=True):
            for sample, piece in pieces:
                turns[sample] += list(zip(piece.token_ids, piece.logprobs, strict=True))
                ends[sample] = piece.finish or ends.get(sample)
        return turns, ends

    turns, ends = asyncio.run(collect())
    assert reads > 2
    for sample, turn in turns.items():
        tokens = [token for token, _ in turn]
        assert 0 < len(tokens) <= 20
        assert ends[sample] == ("stop" if tokens[-1] in dialogue.stop_ids else "length")
        expected = forced_policy.logprobs([*prompt, *tokens])[len(prompt) :]
        assert [logprob for _, logprob in turn] == pytest.approx(expected, abs=1e-5)
