"""Several updates a step: what each is made of, what they share, and what the step reports of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.data.packing import pack
from forge.losses import SFTLoss
from forge.training import checkpoint
from forge.training.step import mini_batches
from forge.types import Episode
from tests.training.cases import episodes, example, largest_difference, make_trainer, weights_of
from tests.training.ranks import LOSS

LENGTHS = [(3, 5), (1, 9), (6, 2), (2, 1), (4, 4), (3, 3)]


class Recorder:
    """A loss that keeps what each of its calls was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, logprobs, proximal_logprobs, behaviour_logprobs, advantages, weights):
        self.seen.append(
            {
                "now": logprobs.detach().numpy(),
                "start": proximal_logprobs.numpy(),
                "behaviour": behaviour_logprobs.numpy(),
                "episodes": sorted({round(a, 6) for a in advantages.tolist()}),  # each has an advantage of its own
                "advantages": advantages.numpy(),
                "total": weights.sum().item(),
            }
        )
        return -(weights * advantages * logprobs).sum()


def numbered(rows: list[Episode]) -> list[Episode]:
    for number, episode in enumerate(rows):
        episode.advantage = number + 1.0
    return rows


def test_step_with_one_mini_batch_equals_plain_step(model: Path):
    plain, named = make_trainer(model), make_trainer(model, mini_batches=1, epochs=1)
    for seed in range(2):
        metrics = plain.train_step(example(seed), LOSS)
        assert (metrics, metrics["updates"]) == (named.train_step(example(seed), LOSS), 1.0)
    assert largest_difference(weights_of(plain), weights_of(named)) == 0.0


def test_mini_batch_updates_equal_separate_steps_on_each_part(model: Path):
    """Against a trainer that makes one update a step, of batches packed from the episodes that each update had."""
    rows, recorder = numbered(episodes(LENGTHS)), Recorder()
    trainer = make_trainer(model, mini_batches=3, epochs=2)
    metrics = trainer.train_step(pack(rows, aggregation="sequence_mean"), recorder)
    parts = [seen["episodes"] for seen in recorder.seen]
    for epoch in (parts[:3], parts[3:]):
        assert sorted(number for part in epoch for number in part) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert parts[:3] != parts[3:]
    assert [seen["total"] for seen in recorder.seen] == pytest.approx([1.0] * 6)
    plain = make_trainer(model)
    single = [
        plain.train_step(pack([rows[int(n) - 1] for n in part], aggregation="sequence_mean"), Recorder())
        for part in parts
    ]
    assert largest_difference(weights_of(trainer), weights_of(plain)) < 1e-5
    assert (trainer.step, metrics["updates"], metrics["micro_batches"]) == (1, 6.0, 6.0)
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(np.mean([step[name] for step in single]), rel=1e-4)
    tokens = np.array([sum(LENGTHS[int(n) - 1][1] for n in part) for part in parts])
    expected = (np.array([step["entropy"] for step in single]) * tokens).sum() / tokens.sum()
    assert metrics["entropy"] == pytest.approx(expected, rel=1e-5)


def test_mini_batch_order_changes_each_step_and_is_kept_on_resume(model: Path, tmp_path: Path):
    batch = pack(numbered(episodes(LENGTHS)))
    trainer, first, second = make_trainer(model, mini_batches=3), Recorder(), Recorder()
    trainer.train_step(batch, first)
    path = checkpoint.save_checkpoint(trainer, tmp_path)
    trainer.train_step(batch, second)
    assert [seen["episodes"] for seen in first.seen] != [seen["episodes"] for seen in second.seen]
    restored, again = make_trainer(model, mini_batches=3), Recorder()
    checkpoint.load_checkpoint(restored, path)
    restored.train_step(batch, again)
    assert largest_difference(weights_of(restored), weights_of(trainer)) == 0.0
    assert [seen["episodes"] for seen in again.seen] == [seen["episodes"] for seen in second.seen]


def test_proximal_policy_logprobs_are_fixed_at_step_start(model: Path):
    rows, recorder = numbered(episodes(LENGTHS)), Recorder()
    rows[2].logprobs = None  # nobody knows what its sampler's were
    batch, trainer = pack(rows), make_trainer(model, mini_batches=2, epochs=2, seq_len=16, learning_rate=1e-2)
    start = trainer.logprobs(batch)
    of_episode = dict(zip(range(1, 7), np.split(start, np.cumsum(batch.lengths)[:-1]), strict=True))
    trainer.train_step(batch, recorder)
    for number, seen in enumerate(recorder.seen):
        expected = np.concatenate([of_episode[int(n)][-LENGTHS[int(n) - 1][1] :] for n in _runs(seen["advantages"])])
        np.testing.assert_allclose(seen["start"], expected, atol=1e-5)
        unknown = seen["advantages"] == 3.0
        np.testing.assert_array_equal(seen["behaviour"][unknown], seen["start"][unknown])
        assert not (seen["behaviour"] == seen["start"])[~unknown].any()
        if number >= 4:  # after an update
            assert np.abs(seen["now"] - seen["start"]).max() > 1e-3
    alone = Recorder()
    make_trainer(model).train_step(batch, alone)
    np.testing.assert_array_equal(alone.seen[0]["start"], alone.seen[0]["now"])


def _runs(advantages: np.ndarray) -> list[float]:
    """The episodes' numbers, in their order."""
    return [a for i, a in enumerate(advantages.tolist()) if i == 0 or a != advantages[i - 1]]


def test_mini_batches_keep_episodes_whole_and_weights_normalised():
    batch = pack(numbered(episodes([*LENGTHS, (2, 2), (5, 1)])), unit=2, aggregation="sequence_mean")
    seen = []
    for part in mini_batches(batch, 3, (0, 0)):
        assert part.weights.sum() == pytest.approx(1.0)
        numbers = [int(a.max()) for a in np.split(part.advantages, np.cumsum(part.lengths)[:-1])]
        assert all(odd % 2 and even == odd + 1 for odd, even in zip(numbers[::2], numbers[1::2], strict=True))
        seen += numbers
    assert sorted(seen) == list(range(1, 9))
    assert len(list(mini_batches(batch, 9, (0, 0)))) == 4
    assert next(mini_batches(batch, 1, (0, 0))) is batch


def test_samples_of_one_prompt_share_a_mini_batch():
    batch = pack(numbered(episodes([(2, 3), (2, 1), (4, 2), (2, 2), (2, 5), (4, 1), (2, 2)])))
    batch.groups = np.array([7, 7, 2, 7, 9, 2, 9])  # any numbers, in any order
    parts = list(mini_batches(batch, 3, (0, 0)))
    assert sorted(tuple(np.unique(part.groups)) for part in parts) == [(2,), (7,), (9,)]
    for part in parts:  # all of the group, in its order, and scaled by groups
        of_group = batch.select(np.flatnonzero(batch.groups == part.groups[0]))
        assert (part.advantages == of_group.advantages).all()
        assert part.weights == pytest.approx(3 * of_group.weights)
    first, second = mini_batches(batch, 2, (0, 0))
    assert not {*first.groups} & {*second.groups}
    assert len(first) + len(second) == len(batch)
    # With fewer prompts than parts no update is lost: samples are divided.
    parts = list(mini_batches(batch, 4, (0, 0)))
    assert [len(part) for part in parts] == [2, 2, 2, 1]


def test_non_finite_mini_batch_update_keeps_earlier_updates(model: Path):
    class Breaks:
        calls = 0

        def __call__(self, logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return -(weights * logprobs).sum() * (float("nan") if self.calls > 1 else 1.0)

    trainer, other = make_trainer(model, epochs=2), make_trainer(model)
    with pytest.raises(FloatingPointError, match=r"step 0: loss nan.* the update was not applied"):
        trainer.train_step(example(), Breaks())
    other.train_step(example(), SFTLoss())
    assert trainer.step == 0
    assert largest_difference(weights_of(trainer), weights_of(other)) < 1e-6


@pytest.mark.parametrize("settings", [{"mini_batches": 0}, {"epochs": 0}])
def test_invalid_mini_batch_settings_raise(model: Path, settings: dict[str, int]):
    with pytest.raises(ValueError, match=r"(mini_batches|epochs) must be at least 1, got 0"):
        make_trainer(model, **settings)
