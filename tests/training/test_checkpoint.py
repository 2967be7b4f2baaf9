"""Checkpoints and exports of one process: exact continuation, housekeeping, and nothing half-written in sight."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.system.checksums import DamagedFile
from forge.training import checkpoint
from forge.training.checkpoint import Background
from forge.training.checkpoint_reader import UnsafeCheckpoint
from tests.training.cases import example, largest_difference, make_trainer, weights_of
from tests.training.ranks import LOSS


@pytest.mark.parametrize("which", ["model", "untied"])
def test_trainer_checkpoint_resumes_bit_for_bit(which: str, tmp_path: Path, request: pytest.FixtureRequest):
    folder = request.getfixturevalue(which)
    trainer = make_trainer(folder)
    for seed in range(3):
        trainer.train_step(example(seed), LOSS)
    path = checkpoint.save_checkpoint(trainer, tmp_path, extra={"position": [1, 2], "name": "x"})
    drawn = torch.rand(3)
    after = [trainer.train_step(example(seed), LOSS) for seed in (3, 4)]

    restored = make_trainer(folder, learning_rate=1e-3)
    torch.manual_seed(99)
    assert checkpoint.load_checkpoint(restored, path) == {"position": [1, 2], "name": "x"}
    assert torch.equal(torch.rand(3), drawn)
    assert restored.step == 3
    assert [restored.train_step(example(seed), LOSS) for seed in (3, 4)] == after
    assert largest_difference(weights_of(restored), weights_of(trainer)) == 0.0


def test_resuming_without_optimizer_state_changes_training(model: Path, tmp_path: Path):
    """What the test above would miss if moments were not restored."""
    trainer = make_trainer(model)
    for seed in range(3):
        trainer.train_step(example(seed), LOSS)
    checkpoint.export_model(trainer, tmp_path / "model", model)
    trainer.train_step(example(3), LOSS)
    fresh = make_trainer(tmp_path / "model")
    fresh.train_step(example(3), LOSS)
    assert largest_difference(weights_of(fresh), weights_of(trainer)) > 1e-4


def test_checkpoint_saved_before_first_step_restores(model: Path, tmp_path: Path):
    trainer, restored = make_trainer(model), make_trainer(model)
    path = checkpoint.save_checkpoint(trainer, tmp_path)
    assert largest_difference(weights_of(trainer), weights_of(restored)) == 0.0
    assert checkpoint.load_checkpoint(restored, path) == {}
    assert restored.train_step(example(), LOSS) == trainer.train_step(example(), LOSS)
    assert largest_difference(weights_of(restored), weights_of(trainer)) == 0.0


def test_only_newest_trainer_checkpoints_are_kept(model: Path, tmp_path: Path):
    trainer = make_trainer(model)
    for step in (3, 20, 999_999, 1_000_000, 1_000_001):
        trainer.step = step
        checkpoint.save_checkpoint(trainer, tmp_path, keep=3)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == [
        "step_999999",
        "step_1000000",
        "step_1000001",
    ]
    assert len(list(tmp_path.iterdir())) == 3
    checkpoint.save_checkpoint(trainer, tmp_path, extra={"again": True}, keep=1)
    (only,) = checkpoint.list_checkpoints(tmp_path)
    assert checkpoint.load_checkpoint(trainer, only) == {"again": True}


def test_incomplete_trainer_checkpoint_is_ignored(model: Path, tmp_path: Path):
    trainer = make_trainer(model)
    first = checkpoint.save_checkpoint(trainer, tmp_path)
    trainer.train_step(example(), LOSS)
    with pytest.raises(UnsafeCheckpoint):
        checkpoint.save_checkpoint(trainer, tmp_path, extra={"runs code": print})
    assert list(tmp_path.iterdir()) == [first]
    unfinished = tmp_path / "step_000001.unfinished"
    shutil.copytree(first, unfinished)
    assert checkpoint.list_checkpoints(tmp_path) == [first]
    for path in (unfinished, tmp_path / "step_000001"):
        with pytest.raises(FileNotFoundError, match="is not a complete checkpoint"):
            checkpoint.load_checkpoint(trainer, path)
    with pytest.raises(DamagedFile, match=r"checksums.txt is missing"):
        checkpoint.load_checkpoint(trainer, tmp_path)
    second = checkpoint.save_checkpoint(trainer, tmp_path)
    assert checkpoint.list_checkpoints(tmp_path) == [first, second] == sorted(tmp_path.iterdir())
    assert checkpoint.list_checkpoints(tmp_path / "nowhere") == []


def test_background_checkpoint_save_does_not_block_training(model: Path, tmp_path: Path):
    trainer = make_trainer(model)
    trainer.train_step(example(0), LOSS)
    expected = checkpoint.save_checkpoint(trainer, tmp_path / "waited for", extra={"name": "x"})
    background = Background(trainer)
    path = background.save(tmp_path / "copied", extra={"name": "x"})
    after = [trainer.train_step(example(seed), LOSS) for seed in (1, 2, 3)]
    background.wait()
    first, second = make_trainer(model), make_trainer(model)
    assert checkpoint.load_checkpoint(first, path) == checkpoint.load_checkpoint(second, expected) == {"name": "x"}
    assert largest_difference(weights_of(first), weights_of(second)) == 0.0
    assert [first.train_step(example(seed), LOSS) for seed in (1, 2, 3)] == after
    assert largest_difference(weights_of(first), weights_of(trainer)) == 0.0


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to write more than this into a file, as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1000, 40_000])
def test_full_disk_during_save_leaves_older_checkpoint_loadable(model: Path, tmp_path: Path, size: int):
    trainer = make_trainer(model)
    trainer.train_step(example(0), LOSS)
    first = checkpoint.save_checkpoint(trainer, tmp_path, extra={"name": "x"})
    trainer.train_step(example(1), LOSS)
    background, message = Background(trainer), rf"step_000002 could not be written: .*; the newest is {first}"
    with largest_file(size):
        with pytest.raises(checkpoint.CheckpointFailed, match=message):
            checkpoint.save_checkpoint(trainer, tmp_path)
        background.save(tmp_path)
        with pytest.raises(checkpoint.CheckpointFailed, match=message):
            background.wait()
    assert list(tmp_path.iterdir()) == [first]
    restored = make_trainer(model)
    assert checkpoint.load_checkpoint(restored, first) == {"name": "x"}
    assert restored.train_step(example(1), LOSS) is not None
    assert largest_difference(weights_of(restored), weights_of(trainer)) == 0.0
    assert checkpoint.save_checkpoint(trainer, tmp_path).name == "step_000002"


@pytest.mark.parametrize("which", ["model", "untied"])
def test_exported_model_has_equal_logits_in_transformers(which: str, tmp_path: Path, request: pytest.FixtureRequest):
    folder = request.getfixturevalue(which)
    trainer = make_trainer(folder)
    trainer.train_step(example(), LOSS)
    for _ in range(2):  # the second takes the place of the first
        checkpoint.export_model(trainer, tmp_path / "model", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert exported.dtype == torch.float32
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.arange(3, 13)[None]
    start = plain(ids).logits
    plain.load_state_dict(weights_of(trainer), strict=False)
    assert torch.equal(exported(ids).logits, plain(ids).logits)
    assert not torch.equal(start, plain(ids).logits)
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == (which == "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("abc").input_ids == [3, 4, 5]
    assert "forge" not in (tmp_path / "model" / "config.json").read_text()


def test_export_does_not_replace_unrelated_directories(model: Path, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="is not a model"):
        checkpoint.export_model(make_trainer(model), tmp_path, model)
    assert (tmp_path / "notes.txt").read_text() == "keep me"
