"""Tokens as they are drawn: joined, they are the completions, versions and all."""

import time
from dataclasses import replace
from typing import Any

import pytest

from forge.engines.interface import extend_completion
from forge.types import Completion, Sampling

from ..conftest import check_by_hand, error_of
from .conftest import SLOTS, Hold, Subject, digest, wait_for

pytestmark = pytest.mark.costly


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.wholes: dict[int, Completion] = {}
        self.pieces = 0

    def __call__(self, sample: int, piece: Completion) -> None:
        assert len(piece.token_ids) == len(piece.logprobs) == len(piece.versions) > 0
        assert set(piece.identities) == set(piece.versions)
        self.pieces += 1
        if sample in self.wholes:
            assert self.wholes[sample].finish == "", "a piece after the last"
            extend_completion(self.wholes[sample], piece)
        else:
            self.wholes[sample] = piece

    def completions(self) -> list[Completion]:
        return [whole for _, whole in sorted(self.wholes.items())]


def test_streamed_chunks_join_to_full_completions(engine: Any) -> None:
    sampling = Sampling(n=5, max_tokens=12, temperature=2.0, stop_token_ids=(7, 8, 9), seed=3, top_logprobs=4)
    heard = [Heard(), Heard(), Heard()]
    prompts = [[1, 2], [3] * 200, [4]]
    futures = [
        engine.submit(prompt, sampling, listener=listener) for prompt, listener in zip(prompts, heard, strict=True)
    ]
    # More than there are slots, and some that nobody listens to.
    plain = engine.submit([1, 2], replace(sampling, top_logprobs=0))
    for future, listener in zip(futures, heard, strict=True):
        assert future.result(60) == listener.completions()
        assert listener.pieces > 2 * sampling.n, "they came as they were drawn"
    assert {c.finish for listener in heard for c in listener.completions()} == {"stop", "length"}
    assert [c.token_ids for c in plain.result(60)] == [c.token_ids for c in heard[0].completions()]


@pytest.mark.parametrize(
    "mode", ["continue", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("finish", "recompute"))]
)
def test_streamed_chunks_match_the_weight_version_they_name(subject: Subject, engine: Any, mode: str) -> None:
    engine.on_update = mode
    sampling = Sampling(n=6, max_tokens=300, seed=1)
    heard, hold = [Heard(), Heard()], Hold(pieces=60)

    def first(sample: int, piece: Completion) -> None:
        heard[0](sample, piece)
        hold(sample, piece)

    futures = [
        engine.submit([1, 2, 3], sampling, listener=first),
        engine.submit([4, 5] * 90, sampling, listener=heard[1]),
    ]
    wait_for(hold.holds.is_set)
    for version in (1, 2):
        update = subject.update(version)
        hold.release()
        update.result(60)
        time.sleep(0.02)
    for future, listener in zip(futures, heard, strict=True):
        completions = future.result(60)
        assert listener.completions() == completions
        for completion in completions:
            assert completion.identities == {v: digest(v) for v in set(completion.versions)}
            check_by_hand(subject.models, completion, keep=mode == "continue")
    seen = [len(set(c.versions)) for listener in heard for c in listener.completions()]
    assert (max(seen) > 1) == (mode != "finish")


@pytest.mark.parametrize("when", ["first", "middle", "last"])
def test_stream_listener_error_fails_only_its_request(subject: Subject, engine: Any, when: str) -> None:
    told: list[Completion] = []

    def broken(sample: int, piece: Completion) -> None:
        told.append(piece)
        if when == "first" or (when == "last" and piece.finish) or (when == "middle" and len(told) == 10):
            raise LookupError("nobody there")

    heard = Heard()
    other = engine.submit([5, 6], Sampling(n=2, max_tokens=60, seed=1), listener=heard)
    # More samples than slots: some of them wait when the others fail.
    future = engine.submit([1, 2], Sampling(n=SLOTS + 4, max_tokens=20, seed=2), listener=broken)
    with pytest.raises(LookupError, match="nobody there"):
        future.result(60)
    after = len(told)
    assert other.result(60) == heard.completions()
    assert max(error_of(subject.models[0], c) for c in other.result()) < 1e-4
    wait_for(lambda: engine.stats()["running"] == engine.stats()["waiting"] == 0)
    assert len(told) - after <= SLOTS  # of the step that was under way
