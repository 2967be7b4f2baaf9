"""`forge train` as a user starts it."""

import sys

import pytest

from forge.cli import main


@pytest.mark.processes
def test_modules_of_the_working_folder_are_found(tmp_path, monkeypatch):
    (tmp_path / "losses_of_mine.py").write_text(
        "def loss(logprobs, weights):\n    return -(weights * logprobs).sum()\n"
    )
    (tmp_path / "run.yaml").write_text("model: nowhere\ndataset: {path: rows.jsonl}\nalgorithm: losses_of_mine:loss\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(SystemExit, match="error: model folder nowhere does not exist"):
        main(["train", "run.yaml"])
    assert sys.path[0] == str(tmp_path)
