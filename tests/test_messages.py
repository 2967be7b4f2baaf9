"""Errors of what users write: one line that names the fault and what to write instead."""

import re
from pathlib import Path

import pytest

from forge.actors import Trainer
from forge.config import ConfigError, load
from forge.config.yaml_files import read_yaml
from forge.observability.folder import RunLock
from forge.recipes.placement import check_gpus
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller import ForgeActor, endpoint
from forge_http.web import bind_socket

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "apps/grpo/tiny.yaml")


def error_of(*overrides: str, config: str = TINY) -> str:
    with pytest.raises(ConfigError) as raised:
        load(RLConfig, ["--config", config, *overrides])
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("content", "place", "remedy"),
    [
        ("training:\n\tsteps: 3\n", "line 2, column 1", "a tab: indent with spaces"),
        ("training:\n  steps: 3\n\tlearning_rate: 1\n", "line 3, column 1", "a tab: indent with spaces"),
        ("training:\n  steps:\t3\n", "line 2, column 9", "a tab: indent with spaces"),
        ("dataset: {\n\tpath: x}\n", None, "a tab: indent with spaces"),
        ("model: @x\n", "line 1, column 8", "quote text that starts with @"),
        ("seed: 3\nmodel: `x`\n", "line 2, column 8", "quote text that starts with `"),
        ("model: %x\n", "line 1, column 8", "quote text that starts with %"),
        ("model: *x\n", "line 1", "quote text that starts with * or &"),
        ("dataset: {path: *.jsonl}\n", "line 1", "quote text that starts with * or &"),
        ("model: !x y\n", "line 1", "quote text that starts with !"),
        ("model: *\n", "line 1, column 9", "quote text that starts with * or &"),
        ('model: "C:\\data"\n', "line 1, column 12", r"write \\ for \, or single quotes"),
        ("model: 'it's'\n", "line 1, column 12", "write a quote within it twice"),
        ("model: - a\n", "line 1, column 8", "quote text that starts with -, ?, > or |"),
        ("model: > a\n", "line 1, column 10", "quote text that starts with -, ?, > or |"),
        (
            "training: {steps: 3}\nseed: 1\ntraining: {batch_size: 2}\n",
            "line 3, column 1",
            "'training' is also in line 1",
        ),
        ("training:\n  steps: 3\n  steps: 4\n", "line 3, column 3", "'steps' is also in line 2: remove one"),
        ("training: {steps: 3, steps: 4}\n", "line 1, column 22", "'steps' is also in line 1: remove one"),
        ("block: 1\nblock: 2\n", "line 2, column 1", "'block' is also in line 1: remove one"),
        ("model: a: b\n", "line 1", "quote text that has ': '"),
        ("training:\n  steps: 3\n batch_size: 4\n", "line 3, column 2", "the same indentation"),
        ("seed: 3\n  x: 4\n", "line 2", "the same indentation"),
        ("a: 1\nb\nc: 3\n", "line 3", "the same indentation"),
        ("model: [1, 2\nseed: 3\n", "line 2", "close the bracket"),
        ("model: {a: 1\n", "line 2", "close the bracket"),
        ("model: 'abc\nseed: 3\n", "line 3", "close the quote"),
        ("seed: 2\nmodel: \0\n", "line 2", "U+0000 is not allowed"),
        pytest.param("[" * 2000, None, "nested too deeply", id="2000 brackets"),
    ],
)
def test_malformed_yaml_error_names_line_and_fix(tmp_path, content, place, remedy):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    text = error_of(config=str(path))
    assert text.startswith(f"{path} is not valid YAML: {place or ''}")
    assert remedy in text
    assert "unicode string" not in text
    assert "^" not in text
    assert "  " not in text
    with pytest.raises(ValueError, match=re.escape(text)):
        read_yaml(path)


@pytest.mark.parametrize(
    ("name", "proposal"),
    [
        ("nope.yaml", None),
        ("other.yaml", None),
        ("config.yaml", None),
        ("indent.yml", "indent.yaml"),
        ("ident.yaml", "indent.yaml"),
        ("old_stile.yaml", "old_style.yml"),
        ("indent", "indent.yaml"),
    ],
)
def test_missing_file_error_suggests_only_similar_file_names(tmp_path, name, proposal):
    for file in ("ind.yaml", "indent.yaml", "quote.yaml", "old_style.yml"):
        (tmp_path / file).write_text("")
    text = error_of(config=str(tmp_path / name))
    assert text.partition("; did you mean ")[2] == (f"{tmp_path / proposal}?" if proposal else "")


@pytest.mark.parametrize(
    ("words", "proposal"),
    [
        ("--megatron 2", None),
        ("--generator.backend vllm", None),
        ("--wandb true", "'metrics.wandb'"),
        ("--steps 2", "'training.steps'"),
        ("--every 2", "'checkpoint.every' or 'eval.every'"),
        ("--backend titan", "'trainer.backend'"),
        ("--rewards x", "'reward'"),
        ("--algo x", "'algorithm'"),
        ("--data x", "'dataset'"),
        ("--traning.steps 3", "'training'"),
        ("--training.stesp 3", "'steps'"),
    ],
)
def test_unknown_config_key_error_suggests_only_similar_keys(words, proposal):
    text = error_of(*words.split())
    assert text.partition("; did you mean ")[2] == (f"{proposal}?" if proposal else "")
    assert proposal or "; known here: " in text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_taken_port_error_names_port_once_and_option(host):
    with bind_socket(host, 0) as taken:
        port = taken.getsockname()[1]
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        remedy = r"Address already in use: stop what listens there, or choose another port"
        with pytest.raises(OSError, match=rf"^cannot listen at {re.escape(at)}: {remedy} \(--port 0: ") as raised:
            bind_socket(host, port)
        assert str(raised.value).count(str(port)) == 1


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("203.0.113.7", 8000, r"Cannot assign requested address: choose an address of this machine$"),
        ("nowhere.invalid", 8000, r"[a-z ]+: choose an address of this machine$"),
        ("127.0.0.1", 70000, r".*: choose a port from 0 to 65535$"),
        ("127.0.0.1", -1, r".*: choose a port from 0 to 65535$"),
    ],
)
def test_unusable_listen_address_raises(host, port, text):
    with pytest.raises(OSError, match=rf"(?i)^cannot listen at {re.escape(f'{host}:{port}')}: {text}"):
        bind_socket(host, port)


@pytest.mark.parametrize("root", ["file", "file/deeper", "missing-link"])
def test_unwritable_run_root_error_names_directory(tmp_path, root):
    (tmp_path / "file").write_text("")
    (tmp_path / "missing-link").symlink_to("/proc/nothing/here")
    folder = tmp_path / root / "run"
    with pytest.raises(OSError, match=rf"^run directory {folder} cannot be written \(.*\): set run.root to a writable"):
        RunLock(folder)


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        (("--trainer.procs", "2000"), "--services.trainer.with_gpus false --services.generator.with_gpus false"),
        (
            ("--trainer.num_replicas", "1", "--generator.num_replicas", "999", "--trainer.with_gpus", "false"),
            "--services.generator.with_gpus false",
        ),
    ],
)
def test_missing_gpus_error_names_with_gpus_settings(overrides, flags):
    gpus = ("--generator.with_gpus", "true", "--trainer.with_gpus", "true")
    cfg = load(RLConfig, ["--config", TINY, *gpus, *overrides])
    with pytest.raises(ValueError, match=re.escape(f"set with_gpus to false ({flags})")):
        check_gpus(cfg)


class Lazy(ForgeActor):
    """Has attributes of setup, a property that fails, and none else."""

    def setup(self) -> None:
        self.engine = 1

    @property
    def broken(self) -> int:
        return self.engine

    @endpoint
    def ask(self) -> int:
        return self.engine


def test_local_component_used_before_setup_raises_with_hint():
    with pytest.raises(AttributeError, match=r"^'Lazy' object has no attribute 'engine': call setup\(\) first"):
        Lazy().ask()
    with pytest.raises(AttributeError, match=r"no attribute 'engine': call setup"):
        _ = Lazy().broken
    with pytest.raises(AttributeError, match=r"^'Lazy' object has no attribute 'engnie'$"):
        _ = Lazy().engnie
    lazy = Lazy()
    lazy.setup()
    assert lazy.ask() == 1
    with pytest.raises(AttributeError, match=r"^'Trainer' object has no attribute '\w+': call setup\(\) first"):
        Trainer(str(ROOT), loss=print, optimizer={}, seq_len=8).push_weights(1)
