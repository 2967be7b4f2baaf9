"""What a reward does to its own process costs a run nothing: it ends with the weights of one without such a reward."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forge_cluster.machines import trained
from tests.recipes.strange import KINDS
from tests.recipes.test_no_room import ended

pytestmark = [pytest.mark.processes, pytest.mark.full]

COMMAND = [sys.executable, "-m", "forge", "train", "tests/forge_cluster/tiny.yaml", "--training.steps", "5"]
COMMAND += ["--services.trainer.procs", "1", "--services.trainer.hosts", "null", "--services.generator.hosts", "null"]
COMMAND += ["--services.generator.num_replicas", "1", "--services.reward", "{}"]
COMMAND += ["--reward.functions", "[tests.recipes.strange:Strange]"]
OFTEN = {"changes_its_process"}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("usual")
    assert ended([*COMMAND, "--run.root", str(root)])[0] == 0
    return trained(root / "tiny")


@pytest.mark.parametrize(
    "kind", [pytest.param(one.__name__, marks=() if one.__name__ in OFTEN else pytest.mark.slow) for one in KINDS]
)
def test_a_strange_reward_changes_no_weight(kind: str, tmp_path: Path, usual: str):
    code, lines = ended([*COMMAND, "--run.root", str(tmp_path)], STRANGE=f"{kind}:{tmp_path}/did")
    assert code == 0, lines
    assert (tmp_path / "did").exists()
    lost = [line for line in lines if "reward_actor" in line and "is dead" in line]
    assert bool(lost) == (kind in ("ends", "crashes")), lines
    assert trained(tmp_path / "tiny") == usual
