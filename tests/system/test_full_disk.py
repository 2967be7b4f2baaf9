"""Each kind of write on a disk that is full: one line with the path, the bytes that it needs and those that are free,
nothing half-written, and what was whole before stays whole."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.models import build_small_model
from forge.observability import Run
from forge.observability.folder import LOGS, MARK
from forge.observability.metrics import Snapshot
from forge.observability.rollouts import HELD_OUT, ROLLOUTS, read_batches
from forge.observability.trace import TRACE
from forge.runtime.store import Journal, VersionStore
from forge.system.checksums import check_files
from forge.system.files import NoRoom
from forge.training import checkpoint
from forge.types import Completion, Episode, Prompt, Sample
from forge_inspect.watch.report import write_report
from tests.observability.test_rollouts import group
from tests.system.disks import SmallDisk, small_disk
from tests.training.cases import example, largest_difference, make_trainer, weights_of
from tests.training.ranks import LOSS

pytestmark = pytest.mark.processes

SMALL: dict[str, Any] = {
    "alphabet": "".join(map(chr, range(40, 120))),
    "hidden_size": 64,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "max_positions": 32,
}
WIDE = {f"metric/{number}": float(number) for number in range(400)}  # a row of more than a page


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", "4m") as small:
        yield small


def line(path: Path) -> str:
    """Of an error, with the numbers as groups."""
    return rf"\A{re.escape(str(path))} needs ([\d,]+) bytes, and its disk has ([\d,]+) free: No space left on device\Z"


def fails(path: Path, write: Callable[[], object]) -> tuple[int, int]:
    """The bytes that a write needed and those that were free."""
    with pytest.raises(NoRoom) as caught:
        write()
    numbers = re.search(line(path), str(caught.value))
    assert numbers is not None, caught.value
    needed, free = (int(number.replace(",", "")) for number in numbers.groups())
    assert needed > free
    return needed, free


def a_run(disk: SmallDisk) -> Run:
    run = Run("one", {"seed": 3}, steps=4, root=str(disk.path))
    run.record("all", 1e9, str)
    run.log(0, Snapshot())
    run.sync()
    return run


def evaluation(run: Run) -> None:
    samples = [Sample(Prompt("1 + 1 =" * 100, (1, 7), number), "2") for number in range(20)]
    done = [Completion("two", [1], [0.0], prompt_ids=(1,), finish="stop") for _ in samples]
    run.keep_evaluation(samples, [Episode(one, 1.0, info={"correct": True}) for one in done])
    run.log(1, Snapshot())


WRITES: dict[str, Callable[[Run], object]] = {
    MARK: lambda run: run.log(1, Snapshot(), **WIDE),
    HELD_OUT: evaluation,
    ROLLOUTS: lambda run: run.log_rollouts(1, [group(n, prompt=os.urandom(4000).hex()) for n in range(4)]),
    TRACE: lambda run: run._trace.write(Snapshot(), 1, {f"restarts/{number}": 1.0 for number in range(200)}),
    LOGS: lambda run: run.sync(),
    "report.html": lambda run: write_report(run.folder),
}


@pytest.mark.parametrize("name", WRITES)
def test_run_file_write_on_full_disk_raises_and_keeps_old_files(name: str, disk: SmallDisk):
    run = a_run(disk)
    before = {path.name: path.read_bytes() for path in run.folder.iterdir()}
    disk.fill()
    needed, _ = fails(run.folder / name, lambda: WRITES[name](run))
    assert needed > 100
    after = {path.name: path.read_bytes() for path in run.folder.iterdir()}
    assert after.keys() == before.keys()
    assert all(after[other].startswith(content) for other, content in before.items())
    disk.empty()
    run.close()
    again = Run("one", {"seed": 3}, steps=4, root=str(disk.path), resume="a checkpoint", start=0)
    assert [row["step"] for row in again.history] == [0.0]
    assert [*read_batches(again.folder / ROLLOUTS)] == []
    WRITES[name](again)
    again.close()


def test_finishing_run_on_full_disk_logs_one_warning(disk: SmallDisk, caplog: pytest.LogCaptureFixture):
    run = a_run(disk)
    disk.fill()
    run.finish()
    run.close()
    assert (run.folder / "finished").exists()
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(
        r"trace and report of \S+ could not be written: \S+ needs [\d,]+ bytes, .* free: No space", warning
    )
    assert not (run.folder / "report.html").exists()


def test_run_failed_by_full_disk_logs_no_extra_warning(disk: SmallDisk, caplog: pytest.LogCaptureFixture):
    run = a_run(disk)
    disk.fill()
    run.fail("NoRoom: the disk is full", full=True)
    run.close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("left", [0, 20_000, 200_000, 500_000])
def test_full_disk_leaves_earlier_checkpoint_and_export_readable(left: int, disk: SmallDisk, tmp_path: Path):
    model = Path(build_small_model(tmp_path / "initial", seed=1, **SMALL))
    trainer, folder = make_trainer(model), disk.path / "checkpoints"
    trainer.train_step(example(0), LOSS)
    first = checkpoint.save_checkpoint(trainer, folder)
    checkpoint.export_model(trainer, disk.path / "model", model)
    exported = (disk.path / "model" / "model.safetensors").read_bytes()
    trainer.train_step(example(1), LOSS)
    disk.fill(left)
    with pytest.raises(checkpoint.CheckpointFailed) as caught:
        checkpoint.save_checkpoint(trainer, folder)
    said = r"step_000002 could not be written: No space left on device; the newest is \S+step_000001; it needs ([\d,]+)"
    numbers = re.search(rf"\A[^\n]*{said} bytes, and its disk has ([\d,]+) free\Z", str(caught.value))
    assert numbers is not None, caught.value
    needed, free = (int(number.replace(",", "")) for number in numbers.groups())
    assert free <= left < needed
    assert [*folder.iterdir()] == [first]
    if left < len(exported):
        needed, _ = fails(disk.path / "model", lambda: checkpoint.export_model(trainer, disk.path / "model", model))
        assert 0 <= len(exported) - needed < 20_000  # a header, alongside the tensors
    assert (disk.path / "model" / "model.safetensors").read_bytes() == exported
    assert not (disk.path / "model.unfinished").exists()
    check_files(disk.path / "model")
    disk.empty()
    restored = make_trainer(model)
    checkpoint.load_checkpoint(restored, first)
    restored.train_step(example(1), LOSS)
    assert largest_difference(weights_of(restored), weights_of(trainer)) == 0.0
    assert checkpoint.save_checkpoint(trainer, folder).stat().st_ino != first.stat().st_ino


def test_full_disk_keeps_last_weight_version_readable(disk: SmallDisk):
    store = VersionStore(disk.path)
    store.prepare()
    small = {"a": torch.arange(100_000.0), "b": torch.ones(1000)}
    said = rf"MB of weights do not fit into shared memory, {disk.path}/segments has"
    store.put("policy", small, 1)
    with pytest.raises(OSError, match=rf"\A8 {said} 3\.\d+ MB free"):
        store.put("policy", {"a": torch.zeros(2_000_000)}, 2)
    disk.fill()
    with pytest.raises(OSError, match=rf"\A0\.404 {said} 0 MB free"):
        store.put("policy", small, 2)
    assert store.versions("policy") == [1]
    kept = store.get("policy")
    assert all(torch.equal(kept[name], tensor) for name, tensor in small.items())
    assert len([*store.segments.used.iterdir()]) == 1
    disk.empty()
    assert store.put("policy", {"a": torch.zeros(100_000)}, 2) == 2
    store.segments.forget(everything=True)


def test_full_disk_leaves_journal_records_readable(disk: SmallDisk):
    journal = Journal(disk.path / "journal")
    journal.rewrite([1, 2])
    disk.fill()
    assert fails(journal.path, lambda: journal.append(bytes(10_000)))[0] > 10_000
    fails(journal.path, lambda: journal.rewrite([bytes(10_000)]))
    assert {path.name for path in disk.path.iterdir()} == {"fill", "journal"}
    journal.append(3)
    assert [*Journal(journal.path).replay()] == [1, 2, 3]
