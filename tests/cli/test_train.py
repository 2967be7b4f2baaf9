"""`forge train` as a user starts it."""

import sys

import pytest

from forge.cli import main


@pytest.mark.processes
def test_forge_train_imports_modules_of_working_directory(tmp_path, monkeypatch):
    (tmp_path / "losses_of_mine.py").write_text(
        "def loss(logprobs, weights):\n    return -(weights * logprobs).sum()\n"
    )
    (tmp_path / "run.yaml").write_text("model: nowhere\ndataset: {path: rows.jsonl}\nalgorithm: losses_of_mine:loss\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(SystemExit, match="error: model directory nowhere does not exist"):
        main(["train", "run.yaml"])
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize("command", ["train", "sft", "dpo", "reward-model"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tab.yaml"], "tab.yaml is not valid YAML: line 2, column 1: a tab: indent with spaces"),
        (["list.yaml"], "list.yaml must be a mapping of keys to values, got ['a', 'b']"),
        (["list.yaml", "--seed", "3"], "list.yaml must be a mapping of keys to values, got ['a', 'b']"),
        (["text.yaml", "--run.name", "x"], "text.yaml must be a mapping of keys to values, got 'hello'"),
        (["nope.yaml"], "configuration file nope.yaml does not exist"),
        (["empty.yaml", "seed", "3"], "unexpected argument 'seed': write overrides as --section.key VALUE"),
        (["empty.yaml", "--seed"], "--seed needs a value"),
    ],
)
def test_unreadable_config_fails_before_heavy_imports(tmp_path, monkeypatch, command, words, message):
    for name, text in {"tab": "a:\n\tb: 1\n", "list": "- a\n- b\n", "text": "hello\n", "empty": ""}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.import_module", None)
    with pytest.raises(SystemExit) as ended:
        main([command, *words])
    assert ended.value.code == f"error: {message}"
