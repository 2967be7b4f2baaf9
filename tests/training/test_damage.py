"""Damaged and hostile files: a checkpoint, a model and a weight store are found damaged, and none of them runs code."""

import enum
import io
import os
import pathlib
import pickle
import random
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from forge.models import resolve_model
from forge.runtime.store import CorruptWeights, MissingVersion, VersionStore
from forge.system.checksums import DamagedFile, check_files, read_sealed, write_checksums, write_sealed
from forge.training import checkpoint
from forge.training.checkpoint_reader import Reader, UnsafeCheckpoint, dump_plain, load_plain
from forge.types import Episode, Group, Origin, Seen
from tests.training.cases import example, make_trainer
from tests.training.ranks import LOSS

PLACES = 200


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = make_trainer(model)
    trainer.train_step(example(0), LOSS)
    state = {"groups": [group()], "seen": Seen(3, {5, 7}), "random": random.Random(0).getstate()}
    return checkpoint.save_checkpoint(trainer, tmp_path_factory.mktemp("saved"), extra=state)


def group() -> Group:
    episode = Episode(prompt_ids=[1, 2], response_ids=[3], reward=0.5, logprobs=[-0.1], versions=[4], info={"a": 1})
    episode.origins = frozenset({Origin(4, "ab", "generator[0]")})
    return Group([episode], 3, "t", "p")


def flipped(data: bytes, rng: random.Random) -> bytes:
    hurt = bytearray(data)
    hurt[rng.randrange(len(hurt))] ^= 1 << rng.randrange(8)
    return bytes(hurt)


@pytest.mark.parametrize("kind", ["checkpoint", "model"])
def test_flipped_bits_of_checkpoint_files_raise(saved: Path, model: Path, tmp_path: Path, kind: str):
    folder, check = saved, check_files
    if kind == "model":
        folder, check = tmp_path / "model", lambda path: resolve_model(str(path))
        checkpoint.export_model(make_trainer(model), folder, model)
    rng = random.Random(0)
    check(folder)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for hurt in [b"", whole[:-1], whole + b"\0", *(flipped(whole, rng) for _ in range(PLACES // 2))]:
            path.write_bytes(hurt)
            with pytest.raises(DamagedFile, match=path.name if kind == "checkpoint" else r"remove .*checksums.txt"):
                check(folder)
        path.write_bytes(whole)


@pytest.mark.processes
def test_flipped_bits_in_weight_store_raise_or_have_no_effect():
    rng = random.Random(0)
    store = VersionStore.create()
    weights = {"a": torch.randn(300), "b": torch.arange(77), "c": torch.tensor(True)}
    store.put("policy", weights, 1)
    found = 0
    for path in sorted(path for path in store.root.rglob("*") if path.is_file() and path.stat().st_size):
        whole = path.read_bytes()
        for _ in range(PLACES):
            hurt = flipped(whole, rng)
            with path.open("r+b") as file:  # in place: a segment is mapped
                file.write(hurt)
            try:
                read = VersionStore(store.root).get("policy", version=1)
                assert {name: read[name].tolist() for name in read} == {n: w.tolist() for n, w in weights.items()}
            except (CorruptWeights, MissingVersion):
                found += 1
        with path.open("r+b") as file:
            file.write(whole)
    assert found > PLACES
    store.close()


@pytest.mark.parametrize("code", np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?")
def test_checkpoint_dump_round_trips_every_dtype(code: str):
    state = {"array": np.arange(2).astype(code), "scalar": np.ones(1, code)[0]}
    found = load_plain(io.BytesIO(dump_plain(state, "extra.pt")))
    assert found["array"].dtype == found["scalar"].dtype == np.dtype(code)
    assert (found["array"].tolist(), found["scalar"]) == (state["array"].tolist(), state["scalar"])


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["extra.pt", "rank_0.pt", ".metadata", "__0_0.distcp"])
def test_malicious_pickle_in_checkpoint_raises_without_running_code(
    model: Path, saved: Path, tmp_path: Path, name: str
):
    mark, given = tmp_path / "ran", tmp_path / "step_000001"
    shutil.copytree(saved, given)
    attack = io.BytesIO()
    torch.save(Attack(mark), attack)
    path = given / name
    if name == ".metadata":
        path.write_bytes(pickle.dumps(Attack(mark)))
    elif name == "__0_0.distcp":
        # In the place of the first value that is no tensor, as long as it was.
        metadata = pickle.loads((given / ".metadata").read_bytes())
        item = next(at for at in metadata.storage_data if "step" in at.fqn or "param_groups" in at.fqn)
        place = metadata.storage_data[item]
        data = path.read_bytes()
        path.write_bytes(data + attack.getvalue())
        metadata.storage_data[item] = type(place)(place.relative_path, len(data), len(attack.getvalue()))
        (given / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        path.write_bytes(attack.getvalue())
    write_checksums(given, [path.name for path in given.iterdir() if path.name != "checksums.txt"])
    with pytest.raises(UnsafeCheckpoint, match=r"posix.mkdir|mkdir") as caught:
        checkpoint.load_checkpoint(make_trainer(model), given)
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    with zipfile.ZipFile(attack) as archive:  # torch itself would have
        assert "archive/data.pkl" in archive.namelist()


@pytest.mark.parametrize(("python", "trace"), [("3.11.2", b"getattr"), ("3.13", b"pathlib._local")])
def test_checkpoints_of_other_python_versions_load(
    model: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, trace: bytes
):
    given = tmp_path / "step_000001"
    shutil.copytree(saved, given)
    metadata = pickle.loads((given / ".metadata").read_bytes())
    with monkeypatch.context() as patch:
        if python == "3.11.2":
            patch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        else:
            patch.setitem(sys.modules, "pathlib._local", pathlib)
            patch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
        written = pickle.dumps(metadata)
    assert trace in written
    (given / ".metadata").write_bytes(written)
    write_checksums(given, [path.name for path in given.iterdir() if path.name != "checksums.txt"])
    checkpoint.load_checkpoint(make_trainer(model), given)


class Attribute:
    def __reduce__(self):
        return getattr, (Metadata, "__init__")


def test_checkpoint_unpickler_rejects_class_attributes(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(UnsafeCheckpoint, match=r"names an attribute '__init__'"):
        Reader(tmp_path).read_metadata()


def test_sealed_checkpoint_text_round_trips_and_edits_raise(tmp_path: Path):
    path = tmp_path / "x.yaml"
    for text in ("a: 1\n", "", "# xxh3-128 \n", "ü: 'ö'\n"):
        write_sealed(path, text)
        assert read_sealed(path) == text
    path.write_text("a: 2\n" + path.read_text().splitlines()[-1] + "\n")
    with pytest.raises(DamagedFile, match="was edited"):
        read_sealed(path)
