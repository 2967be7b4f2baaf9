"""Errors of what users write: one line that names the fault and what to write instead."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.actors import Trainer
from forge.cli import main
from forge.config import ConfigError, load
from forge.config.plugin import nearest
from forge.config.yaml_files import read_yaml
from forge.observability import Run
from forge.observability.lock import RunLock
from forge.observability.metrics import Snapshot
from forge.recipes.launch import launch
from forge.recipes.placement import check_gpus
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller import ForgeActor, ForgeError, endpoint, watchdog
from forge.runtime.controller.options import Options
from forge.runtime.controller.processes import take_gpus
from forge_envs.openenv.wire import action_from_json
from forge_http.web import bind

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
        ("model: @x\n", "line 1, column 8", "quote text that begins with @"),
        ("seed: 3\nmodel: `x`\n", "line 2, column 8", "quote text that begins with `"),
        ("model: %x\n", "line 1, column 8", "quote text that begins with %"),
        ("model: *x\n", "line 1", "quote text that begins with * or &"),
        ("dataset: {path: *.jsonl}\n", "line 1", "quote text that begins with * or &"),
        ("model: !x y\n", "line 1", "quote text that begins with !"),
        ("model: *\n", "line 1, column 9", "quote text that begins with * or &"),
        ('model: "C:\\data"\n', "line 1, column 12", r"write \\ for \, or single quotes"),
        ("model: 'it's'\n", "line 1, column 12", "write a quote within it twice"),
        ("model: - a\n", "line 1, column 8", "quote text that begins with -, ?, > or |"),
        ("model: > a\n", "line 1, column 10", "quote text that begins with -, ?, > or |"),
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
        ("seed: 2020-99-99\n", None, "month must be in 1..12"),
        pytest.param("[" * 2000, None, "nested too deeply", id="2000 brackets"),
    ],
)
def test_malformed_yaml(tmp_path, content, place, remedy):
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


def test_sections_with_common_keys_may_differ_in_one(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: [{x: 1}, {x: 2}]\n")
    assert read_yaml(path)["b"] == {"x": 3, "y": 2}


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
def test_a_missing_file_proposes_only_a_similar_name(tmp_path, name, proposal):
    for file in ("ind.yaml", "indent.yaml", "quote.yaml", "old_style.yml"):
        (tmp_path / file).write_text("")
    text = error_of(config=str(tmp_path / name))
    assert text.partition("; did you mean ")[2] == (f"{tmp_path / proposal}?" if proposal else "")


def test_a_folder_is_no_configuration(tmp_path):
    assert error_of(config=str(tmp_path)) == f"{tmp_path} is a folder: give the configuration file"


@pytest.mark.parametrize(
    ("words", "proposal"),
    [
        ("--provisioner.launcher slurm", None),
        ("--actors.trainer.procs 2", None),
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
def test_an_unknown_name_proposes_only_a_close_one(words, proposal):
    text = error_of(*words.split())
    assert text.partition("; did you mean ")[2] == (f"{proposal}?" if proposal else "")
    assert proposal or "; known here: " in text


@pytest.mark.parametrize("name", ["", "x", "se"])
def test_a_name_of_a_letter_or_two_is_no_beginning(name):
    assert nearest(name, ["seed", "x_label"]) == "; known here: seed, x_label"


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("--metrics.wandb true", "metrics.wandb: {project: ...}, or --metrics.wandb.project ..."),
        ("--metrics.wandb mine", "metrics.wandb: {project: mine}, or --metrics.wandb.project mine"),
        ("--metrics.trackio true", "metrics.trackio: {project: ...}, or --metrics.trackio.project ..."),
        ("--dataset openai/gsm8k", "dataset: {path: openai/gsm8k}, or --dataset.path openai/gsm8k"),
        ("--dataset null", "dataset: {path: ...}, or --dataset.path ..."),
        ("--trainer titan", "trainer: {backend: titan}, or --trainer.backend titan"),
        ("--trainer 4", "trainer: {backend: ...}, or --trainer.backend ..."),
        ("--services.trainer 2", "services.trainer: {procs: ...}, or --services.trainer.procs ..."),
        ("--eval 5", "eval: {problems: ...}, or --eval.problems ..."),
    ],
)
def test_a_value_in_place_of_a_section_shows_the_form(words, form):
    text = error_of(*words.split())
    assert text.endswith(f": write {form} on the command line")


def test_a_missing_section_shows_its_form(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\n")
    form = "write dataset: {path: ...}, or --dataset.path ... on the command line"
    assert error_of(config=str(path)) == f"'dataset' must be set: {form}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_taken_port_is_named_once_with_a_remedy(host):
    with bind(host, 0) as taken:
        port = taken.getsockname()[1]
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        remedy = r"Address already in use: stop what listens there, or choose another port"
        with pytest.raises(OSError, match=rf"^cannot listen at {re.escape(at)}: {remedy} \(--port 0: ") as raised:
            bind(host, port)
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
def test_an_address_that_no_server_can_have(host, port, text):
    with pytest.raises(OSError, match=rf"(?i)^cannot listen at {re.escape(f'{host}:{port}')}: {text}"):
        bind(host, port)


@pytest.mark.parametrize("root", ["file", "file/deeper", "missing-link"])
def test_a_root_that_cannot_be_written_is_named(tmp_path, root):
    (tmp_path / "file").write_text("")
    (tmp_path / "missing-link").symlink_to("/proc/nothing/here")
    folder = tmp_path / root / "run"
    with pytest.raises(OSError, match=rf"^a run cannot be written to {folder} \(.*\): set run.root to a folder"):
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
def test_missing_gpus_name_the_flags_to_do_without(overrides, flags):
    gpus = ("--generator.with_gpus", "true", "--trainer.with_gpus", "true")
    cfg = load(RLConfig, ["--config", TINY, *gpus, *overrides])
    with pytest.raises(ValueError, match=re.escape(f"set with_gpus to false ({flags})")):
        check_gpus(cfg)


@pytest.mark.parametrize(("free", "count"), [([], 1), (["0"], 2), (["2", "5"], 8)])
def test_a_host_without_free_gpus_names_the_flag(free, count):
    flag = re.escape("set with_gpus to false (--services.generator.with_gpus false)")
    with pytest.raises(ForgeError, match=rf"generator asks for {count} GPUs and {len(free)} are free .* {flag}$"):
        take_gpus([*free], count, "generator")


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ({"code": "print(1)"}, "'code'"),
        ({"message": "hello"}, "'message'"),
        ({"tool": "add", "args": {}}, "'args', 'tool'"),
        ({"action_id": 3}, "'action_id'"),
        ({"text": "a", "moves": []}, "'moves'"),
    ],
)
def test_an_action_of_another_schema_names_the_fields(action, fields):
    with pytest.raises(ValueError, match=rf"^an action has no field {fields}: its fields are text, "):
        action_from_json(action)


@pytest.mark.parametrize("start", [lambda: main(["runs"]), lambda: launch(None, RLConfig, ["--config", TINY])])
def test_an_interruption_without_a_handler_ends_quietly(monkeypatch, start):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("forge_inspect.cli.runs.list_runs", interrupt)
    monkeypatch.setattr("forge.recipes.launch.execute", interrupt)
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 130


@pytest.mark.parametrize("steps", [0, 1])
def test_only_a_report_that_exists_is_named(tmp_path, caplog, steps):
    record = Run("one", {}, steps=2, root=str(tmp_path))
    for step in range(steps):
        record.log(step, Snapshot())
    with caplog.at_level(logging.INFO):
        record.close()
    report = tmp_path / "one/report.html"
    assert report.exists() == (str(report) in caplog.text) == bool(steps)


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


def test_a_component_in_this_process_asks_for_its_setup():
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
        Trainer(str(ROOT), loss=None, optimizer={}, seq_len=8).push_weights(1)


class Starting:
    """A replica whose start takes its time."""

    options = Options(stall_after=60.0, setup_timeout=300.0)

    def __init__(self) -> None:
        process = SimpleNamespace(stacks=self.stacks)
        self.group = SimpleNamespace(processes=[process])

    def __str__(self) -> str:
        return "generator[0]"

    async def stacks(self) -> str:
        return "  File wait.py, line 3"


def test_a_slow_start_is_a_line_until_it_takes_too_long(monkeypatch, caplog):
    """At 60 s, and again at twice that; with stacks from half of setup_timeout on."""
    replica, now = Starting(), [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])

    async def pass_time(_: float) -> None:
        now[0] += 20.0
        if now[0] > 280:
            raise asyncio.CancelledError

    monkeypatch.setattr(watchdog.asyncio, "sleep", pass_time)
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        asyncio.run(watchdog.Watchdog({}, {replica: 0.0}).watch())
    first, second, third = caplog.messages
    assert first == "generator[0] has been starting for 60 s, of at most 300"
    assert second == "generator[0] has been starting for 120 s, of at most 300"
    assert "wait.py, line 3" in third
