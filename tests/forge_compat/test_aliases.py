"""Older names of packages: the same modules, from Python and from the command line."""

import importlib
import pickle
import subprocess
import sys

import pytest

from forge_compat.aliases import ALIASES


@pytest.mark.parametrize(("old", "new"), ALIASES.items())
def test_renamed_module_is_importable_by_old_name(old: str, new: str):
    module = importlib.import_module(old)
    assert module is importlib.import_module(new)
    assert module.__name__ == new
    assert module.__spec__ is not None
    assert module.__spec__.name == new


def test_classes_imported_by_old_module_name_are_identical():
    from forge.controller.options import Options
    from forge.data.rewards import ExactMatch
    from forge.data.rewards.math import MathReward
    from forge.verifiers import MathVerifier

    from forge.runtime.controller import Options as options_of_today

    assert Options is options_of_today
    assert MathReward().__class__.__module__ == "forge.rewards.rules.math"
    assert MathVerifier.__module__ == "forge_verifiers.rule_verifiers"
    assert pickle.loads(pickle.dumps(ExactMatch())) == ExactMatch()


@pytest.mark.processes
def test_renamed_module_runs_as_program_by_old_name():
    errors = []
    for module in ("forge.cluster.torchrun", "forge_cluster.torchrun"):
        ended = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
        errors.append((ended.returncode, ended.stderr))
    assert errors[0] == errors[1]
    assert "start this program with torchrun" in errors[0][1]
