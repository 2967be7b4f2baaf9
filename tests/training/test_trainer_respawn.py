"""A trainer that is killed at any moment has, once replaced, the weights that it would have had: to the bit."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.actors import Trainer
from forge.losses import GRPOLoss
from forge.runtime.controller import Unrecoverable
from forge.runtime.store import Journal
from forge.training import checkpoint
from tests.actors.respawn import request, started
from tests.training.cases import episodes, example, largest_difference, weights_of
from tests.training.ranks import LOSS

pytestmark = pytest.mark.costly

Make = Callable[..., Trainer]
Step = tuple[str, Callable[[Trainer, Path], Any]]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Make:
    def make(incarnation: int, recovery: Path | None = tmp_path / "run", **settings: Any) -> Trainer:
        settings = {"loss": LOSS, "optimizer": {"learning_rate": 1e-3}, **settings}
        trainer = Trainer(str(model), recovery=None if recovery is None else str(recovery), **settings)
        return started(trainer, incarnation)

    return make


def train(seed: int) -> Step:
    return f"train {seed}", lambda trainer, _: trainer.train_step(example(seed))


def save(name: str, keep: int = 1) -> Step:
    return name, lambda trainer, folder: Path(trainer.save_checkpoint(str(folder), {"name": name}, keep)).name


def begin(name: str, keep: int = 1) -> Step:
    """A checkpoint that is written while training goes on."""
    return name, lambda trainer, folder: Path(trainer.save_checkpoint(str(folder), {"name": name}, keep, False)).name


def load(step: int) -> Step:
    return "load", lambda trainer, folder: trainer.load_checkpoint(str(folder / f"step_{step:06d}"))


SCRIPT = [train(0), train(1), save("a"), train(2), save("b"), save("c"), train(3), load(3), train(4)]
BACKGROUND = [
    train(0),
    begin("a"),
    train(1),
    begin("b", 2),
    train(2),
    save("d"),
    begin("c"),
    train(3),
    load(3),
    train(4),
]


def assert_same(trainer: Trainer, other: Trainer) -> None:
    assert trainer.trainer.step == other.trainer.step
    assert largest_difference(weights_of(trainer.trainer), weights_of(other.trainer)) == 0.0


class Killed(BaseException):
    """The process ends here: what comes after does not happen."""


class Killer:
    """Ends the process just before the n-th thing that is written, renamed or removed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for owner, name in (
            (Journal, "append"),
            (os, "replace"),
            (os, "rename"),
            (os, "rmdir"),
            (checkpoint.dcp, "save"),
            (torch.optim.Optimizer, "zero_grad"),
        ):
            patch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise Killed
            return original(*args, **kwargs)

        return watched


def killed(trainer: Trainer) -> None:
    """Its threads are gone too: what one of them was doing has either been done or not."""
    if trainer.background is not None and trainer.background._thread is not None:
        trainer.background._thread.join()


@pytest.mark.full
@pytest.mark.parametrize(
    "script",
    [pytest.param(SCRIPT, id="waited for", marks=pytest.mark.slow), pytest.param(BACKGROUND, id="in the background")],
)
def test_trainer_killed_at_any_moment_recovers_exactly(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: list[Step]
):
    calm = make(0, tmp_path / "calm")
    expected = [act(calm, tmp_path / "calm") for _, act in script]
    calm.teardown()
    moments = 0
    with monkeypatch.context() as patch:
        killer = Killer(patch)
        while True:
            folder = tmp_path / "run"
            trainer, replaced = make(0), False
            killer.left = moments = moments + 1
            for (name, act), right in zip(script, expected, strict=True):
                with request(name):
                    try:
                        answer = act(trainer, folder)
                    except (Killed, checkpoint.CheckpointFailed):  # torch wraps what is raised while it writes
                        killed(trainer)
                        trainer, replaced = make(1), True
                        answer = act(trainer, folder)
                assert answer == right, (moments, name)
            try:
                trainer.teardown()
            except (Killed, checkpoint.CheckpointFailed):
                trainer, replaced = make(1), True
                trainer.teardown()
            assert_same(trainer, calm)
            assert checkpoint.read_extra(checkpoint.list_checkpoints(folder)[-1])["name"] == "c"
            if not replaced:
                break
            shutil.rmtree(folder)
    assert moments > 30


def test_repeated_trainer_request_is_not_applied_twice(make: Make, tmp_path: Path):
    calm = make(0, tmp_path / "calm")
    trainer = make(0)
    for incarnation, (name, act) in enumerate(SCRIPT, 1):
        expected = act(calm, tmp_path / "calm")
        with request(name):
            assert act(trainer, tmp_path / "run") == expected
            assert act(trainer, tmp_path / "run") == expected
            trainer = make(incarnation)
            assert act(trainer, tmp_path / "run") == expected
        assert_same(trainer, calm)


def test_loaded_checkpoint_becomes_recovery_point_of_trainer(make: Make, tmp_path: Path):
    """And one that is saved elsewhere is not: it may be gone by the time that it is needed."""
    other = make(0, tmp_path / "earlier")
    for seed in range(2):
        other.train_step(example(seed))
    path = other.save_checkpoint(str(tmp_path / "earlier"))
    trainer = make(0)
    trainer.load_checkpoint(path)
    for seed in (2, 3):
        trainer.train_step(example(seed))
        shutil.rmtree(trainer.save_checkpoint(str(tmp_path / "copies")))
    assert_same(make(1), trainer)
    shutil.rmtree(path)
    with pytest.raises(Unrecoverable, match="step_000002 is not a complete checkpoint"):
        make(2)


def test_respawned_trainer_repeats_episode_steps_exactly(make: Make):
    settings = {"loss": GRPOLoss(), "aggregation": "sequence_mean"}
    trainer = make(0, **settings)
    trainer.train_step(episodes([(3, 5), (1, 9)]))
    assert trainer.trainer.step == 1
    assert_same(make(1, **settings), trainer)


def test_failed_training_step_is_not_repeated_after_respawn(make: Make):
    trainer = make(0)
    trainer.train_step(example(0))
    batch = example(1)
    batch.advantages[:] = float("nan")
    with pytest.raises(FloatingPointError, match="step 1"):
        trainer.train_step(batch)
    trainer.train_step(example(2))
    assert_same(make(1), trainer)


def test_trainer_respawn_without_checkpoint_directory_raises(make: Make):
    with pytest.raises(Unrecoverable, match=r"Trainer\[0\] was replaced and what it had learned .* checkpoint.every"):
        make(1, None)
