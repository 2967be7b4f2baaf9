"""The right tokens with the right log-probabilities, from one caller or from many."""

import math
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from forge.engines import load_engine
from forge.types import Sampling

from ..conftest import EOS, VOCAB, check_shape, error_of, logits_of, oracle
from .conftest import LONGEST, SLOTS, Hold, Subject, wait_for


def test_greedy_engine_tokens_match_transformers(subject: Subject, engine: Any) -> None:
    for prompt in ([1], [7, 8, 9], list(range(40)) * 4):
        completion = engine.submit(prompt, Sampling(max_tokens=40, temperature=0)).result(60)[0]
        expected = subject.models[0].generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert error_of(subject.models[0], completion) < 1e-4


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, 0, 1.0), (1.5, 5, 1.0), (0.7, 0, 0.9), (1.5, 12, 0.8), (1.5, 1, 1.0), (1.5, 0, 1e-6), (2.0, 1000, 0.999)],
)
def test_engine_logprobs_match_top_k_top_p_distribution(
    subject: Subject, engine: Any, temperature: float, top_k: int, top_p: float
) -> None:
    model = subject.models[0]
    plain = engine.submit([9, 9], Sampling(max_tokens=12, seed=8))
    sampling = Sampling(4, 12, temperature=temperature, top_k=top_k, top_p=top_p, seed=5)
    for completion in engine.submit([4, 5, 6], sampling).result(60):
        for token, logprob, logits in zip(
            completion.token_ids, completion.logprobs, logits_of(model, completion).double().tolist(), strict=True
        ):
            assert logprob == pytest.approx(math.log(oracle(logits, temperature, top_k, top_p)[token]), abs=1e-4)
    assert error_of(model, plain.result(60)[0]) < 1e-4  # a neighbour that cuts changes nothing


def test_sampled_token_frequencies_match_model_probabilities(subject: Subject, engine: Any) -> None:
    completions = engine.submit([11, 12], Sampling(n=600, max_tokens=1, temperature=2.0, seed=0)).result(60)
    probs = (logits_of(subject.models[0], completions[0])[0] / 2.0).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB)
    common = probs * 600 >= 5
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * 600
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected.clamp_min(1e-9)).sum().item()
    freedom = int(common.sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_completions_end_at_stop_tokens_or_max_tokens(subject: Subject, engine: Any) -> None:
    for stops in ((), (7, 8, 9)):
        sampling = Sampling(n=40, max_tokens=25, temperature=2.0, stop_token_ids=stops, seed=1)
        completions = engine.submit([1, 2], sampling).result(60)
        check_shape(completions, sampling, {EOS, *stops})
        assert {c.finish for c in completions} == {"stop", "length"}
        assert all(c.prompt_ids == (1, 2) and c.text == "" for c in completions)
    # Together these prompts are too long for one step.
    long = [engine.submit([i] * (LONGEST - 1), Sampling(max_tokens=25, seed=i)) for i in range(SLOTS)]
    assert all(len(future.result(60)[0].token_ids) == 1 for future in long)
    longer = engine.submit([5] * (LONGEST - 10), Sampling(n=8, max_tokens=25)).result(60)
    assert all(len(c.token_ids) == 10 or c.finish == "stop" for c in longer)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one token"), ([VOCAB], "token ids"), ([-1], "token ids"), ([1] * LONGEST, "must be shorter than")],
)
def test_invalid_prompt_token_ids_raise(engine: Any, prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, Sampling())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "slots must be at least 1"),
        ({"max_seq_len": LONGEST + 1}, f"max_seq_len must be 2 to {LONGEST}"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16"),
        ({"on_update": "stop"}, "on_update must be one of continue, finish, recompute; got 'stop'"),
    ],
)
def test_invalid_sampling_settings_raise(subject: Subject, settings: dict[str, Any], message: str) -> None:
    subject.ready()
    with pytest.raises(ValueError, match=message):
        load_engine(subject.name, subject.folder, **settings)


def test_seeded_tokens_are_independent_of_concurrent_requests(engine: Any) -> None:
    wanted = Sampling(n=3, max_tokens=30, top_p=0.9, seed=42)
    alone = [c.token_ids for c in engine.submit([1, 2, 3], wanted).result(60)]
    others = [engine.submit([i] * (i + 1), Sampling(n=1 + i % 3, max_tokens=5 + i)) for i in range(9)]
    crowded = engine.submit([1, 2, 3], wanted)
    others += [engine.submit([i], Sampling(n=2, max_tokens=17, temperature=0)) for i in range(9)]
    assert [c.token_ids for c in crowded.result(60)] == alone
    fewer = engine.submit([1, 2, 3], Sampling(n=2, max_tokens=10, top_p=0.9, seed=42)).result(60)
    assert [c.token_ids for c in fewer] == [ids[:10] for ids in alone[:2]]
    assert len({tuple(ids) for ids in alone}) == 3
    unseeded = [engine.submit([1, 2, 3], Sampling(max_tokens=30)) for _ in range(2)]
    assert unseeded[0].result(60)[0].token_ids != unseeded[1].result(60)[0].token_ids
    for future in others:
        future.result(60)


def test_concurrent_requests_get_the_matching_completions(subject: Subject, engine: Any) -> None:
    model = subject.models[0]

    def caller(i: int) -> None:
        sampling = Sampling(n=1 + i % 3, max_tokens=3 + i % 11, seed=i)
        completions = engine.submit([i % VOCAB] * (1 + i * 17 % 300), sampling).result(60)
        check_shape(completions, sampling, {EOS})
        assert max(error_of(model, c) for c in completions) < 1e-4

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(caller, i) for i in range(32)]
        # The same weights, so that every completion can be checked, whenever it ran.
        updates = [engine.update_weights(model.state_dict().items(), version) for version in range(1, 4)]
        for job in jobs:
            job.result(60)
    for update in updates:
        update.result(60)
    assert engine.version == 3


def test_engine_requests_with_lower_priority_number_start_first(engine: Any) -> None:
    order: list[int] = []
    running = engine.submit([1, 2], Sampling(n=SLOTS, max_tokens=60, temperature=0), listener=(hold := Hold()))
    wait_for(hold.holds.is_set)
    futures = []
    for priority in (2, 1, 1, 0, -1, 2):
        futures.append(engine.submit([3, 4], Sampling(n=SLOTS, max_tokens=4, seed=0), priority=priority))
        futures[-1].add_done_callback(lambda _, priority=priority: order.append(priority))
    hold.release()
    for future in (running, *futures):
        future.result(60)
    assert order == sorted(order)


def test_cancelled_engine_requests_free_slots(subject: Subject, engine: Any) -> None:
    first, second = (engine.submit([i], Sampling(n=SLOTS, max_tokens=500, seed=0)) for i in (1, 2))
    third = engine.submit([3, 4], Sampling(n=2, max_tokens=4, seed=0))
    wait_for(lambda: engine.stats()["running"] > 0)
    assert second.cancel()
    assert first.cancel()
    assert max(error_of(subject.models[0], c) for c in third.result(60)) < 1e-4
    with pytest.raises(CancelledError):
        first.result(1)
    wait_for(lambda: engine.stats()["running"] == engine.stats()["waiting"] == 0)
