"""The weight store between real processes: many ranks, kills, overwriting under load, and what stays behind."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forge.runtime.store import MissingVersion, VersionStore

pytestmark = pytest.mark.processes

RANKS = Path(__file__).parent / "ranks.py"


@pytest.fixture
def store() -> Iterator[VersionStore]:
    store = VersionStore.create()
    yield store
    store.close()


def start(task: str, store: VersionStore, world: int = 1) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(RANKS), task, str(store.root)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen([*command, str(rank), str(world), str(port)], **pipes) for rank in range(world)]


@pytest.mark.full
def test_sharded_rank_layouts_publish_the_same_weight_version(store: VersionStore):
    ranks = start("layouts", store, 4)
    for rank in ranks:
        output, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0, output
    assert store.versions("policy") == [2, 3]
    assert store.manifest("policy", 3).digest == store.manifest("policy", 2).digest


def test_rank_killed_during_store_put_is_named_and_publishes_nothing(store: VersionStore):
    first, second = start("killed", store, 2)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 7, output
    assert "rank 0 waited 2 s for the tensors of rank 1" in output
    assert second.wait(10) == -signal.SIGKILL
    assert store.versions("policy") == [1]
    assert len(store.get("policy")) == 5


@pytest.mark.full
def test_store_readers_see_only_complete_versions_during_overwrites(store: VersionStore):
    writers = start("overwrite", store)
    last, reads = 0.0, 0
    while writers[0].poll() is None or reads == 0:
        try:
            with store.open("w") as snapshot:
                values = {float(value) for _, tensor in snapshot.tensors() for value in tensor.unique()}
                assert values == {float(snapshot.version)}
        except MissingVersion:
            time.sleep(0.01)
            continue
        assert values.pop() >= last
        last, reads = float(snapshot.version), reads + 1
    assert writers[0].returncode == 0, writers[0].communicate()[0]
    assert store.versions("w")[-1] == 1000
    assert reads > 100


@pytest.mark.full
def test_killed_store_writer_keeps_last_complete_version(store: VersionStore):
    rng = random.Random(0)
    for _ in range(3):
        (writer,) = start("slow_put", store)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "putting\n"
        time.sleep(rng.uniform(0.0, 0.3))
        writer.kill()
        writer.communicate()
        if store.exists("w"):
            assert len({float(tensor[0]) for tensor in store.get("w").values()}) == 1
    before = os.listdir(store.root / "segments")
    for writer in start("killed_allocating", store):
        assert writer.wait(60) == -signal.SIGKILL
    for _ in range(3):  # what the killed ones held is used again
        store.put("w", {name: torch.zeros(500_000) for name in "abcdefgh"})
    assert len(os.listdir(store.root / "segments")) + len(os.listdir(store.root / "free")) <= max(len(before), 4)


def test_sweep_removes_only_weight_stores_of_dead_processes(store: VersionStore):
    code = (
        "import os, signal, torch; from forge.runtime.store import VersionStore; s = VersionStore.create();"
        "s.put('w', torch.ones(1)); print(s.root, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    assert left.name.startswith("forge-weights-")
    assert left.is_dir()
    store.put("w", torch.ones(1))
    other = VersionStore.create()
    assert not left.exists()
    assert store.get("w").tolist() == [1.0]
    other.close()
    assert not other.root.exists()
