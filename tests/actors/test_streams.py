"""What a stream tells at once."""

import asyncio
from concurrent.futures import Future

import pytest

from forge.actors import streams
from forge.engines.interface import extend_completion
from forge.types import Completion


class Engine:
    """Keeps what it was asked for: its tokens come from the test."""

    def submit(self, prompt_ids, sampling, *, priority, listener):
        self.listener, self.future = listener, Future()
        return self.future


@pytest.mark.parametrize("top", [0, 3])
def test_token_stream_messages_are_bounded_and_lose_no_tokens(monkeypatch, top):
    monkeypatch.setattr(streams, "MAX_LOGPROBS", 40)
    sizes = [100, 0, 1, *[7] * 20]

    async def main():
        engine = Engine()
        known = streams.Streams(engine)
        number = known.open([5], None, 0)
        for sample, size in enumerate(sizes):
            tops = [dict.fromkeys(range(top), -1.0)] * size if top else []
            piece = Completion("", [*range(size)], [-1.0] * size, {}, (5,), [2] * size, "stop", {2: "w"}, "", tops)
            engine.listener(sample, piece)
        engine.future.set_result([])
        wholes = {sample: Completion() for sample in range(len(sizes))}
        while not all(whole.finish for whole in wholes.values()):
            told = await known.next(number)
            assert told
            assert sum(len(piece.token_ids) * (1 + top) for _, piece in told) <= 40
            for sample, piece in told:
                assert not wholes[sample].finish
                extend_completion(wholes[sample], piece)
        assert await known.next(number) == []
        return [wholes[sample].token_ids for sample in range(len(sizes))]

    assert asyncio.run(main()) == [[*range(size)] for size in sizes]
