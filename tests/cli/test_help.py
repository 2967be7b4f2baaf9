"""The command line explains itself: each command's help has an example that its own parser accepts."""

import argparse
import shlex
import tomllib
from pathlib import Path

import pytest

import forge
from forge.cli import main, make_parser
from forge_cluster.launch_command import LAUNCHERS

ROOT = Path(__file__).parents[2]


def commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> dict[str, argparse.ArgumentParser]:
    """All commands and steps of commands, by their words."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found = {} if nested and not words else {" ".join(words): parser}
    for action in nested:
        for name, inner in action.choices.items():
            found |= commands(inner, (*words, name))
    return found


PARSER = make_parser()
COMMANDS = commands(PARSER)


def test_forge_help_lists_every_command():
    names = "train sft dpo reward-model serve clean worker doctor launch runs compare watch report"
    assert {*names.split(), "weaver", "weaver fit"} <= {*COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_an_example_that_parses(name: str):
    parser = COMMANDS[name]
    assert parser.description
    assert parser.epilog.startswith(f"example: forge {name}")
    example = parser.epilog.removeprefix("example: ").partition(", ")[0]
    assert callable(PARSER.parse_args(shlex.split(example)[1:]).run)
    for action in parser._actions:
        assert action.help or action.choices or action.metavar, (name, action.dest)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_examples_in_launch_help_run(launcher: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", launcher, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    example = text.partition("example: forge ")[2]
    main(shlex.split(example))
    assert "gsm8k" in capsys.readouterr().out


def test_forge_version_prints_project_version(capsys):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"forge {forge.__version__}\n"
    assert forge.__version__ == wanted, "pip install -e . once more"
    assert f"## [{wanted}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.processes
def test_installed_recipe_config_is_found_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"error: model directory runs/quickstart-warmup/model does not exist"):
        main(["train", "apps/grpo/tiny.yaml"])
    (tmp_path / "apps/grpo").mkdir(parents=True)
    (tmp_path / "apps/grpo/tiny.yaml").write_text("model: mine\ndataset: {path: rows.jsonl}\n")
    with pytest.raises(SystemExit, match="error: model directory mine does not exist"):
        main(["train", "apps/grpo/tiny.yaml"])
    with pytest.raises(SystemExit, match=r"error: configuration file apps/grpo/none.yaml does not exist"):
        main(["train", "apps/grpo/none.yaml"])
