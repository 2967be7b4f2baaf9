"""The trackers show what metrics.jsonl and rollouts.arrow have, read back with each tracker's own means."""

import json
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from forge.config import to_dict
from forge.observability import Run
from forge.observability.metrics import Snapshot
from forge.recipes.metrics_config import MetricsConfig
from forge.system.masking import without_secrets
from forge.types import Episode, Group
from forge_trackers import check_trackers

SECTIONS = {
    "tensorboard": True,
    "wandb": {"project": "forge", "mode": "offline", "tags": ["small"]},
}
INSTALLED = [name for name in SECTIONS if find_spec(name)]
CUT, AGAIN = 3, 10.0  # the step that the run resumes from, and what recomputed rewards differ by


def needs(name: str):
    return pytest.mark.skipif(name not in INSTALLED, reason=f"{name} is not installed")


def metrics(*names: str) -> dict:
    return to_dict(MetricsConfig.model_validate({name: SECTIONS[name] for name in names}))


def steps(run: Run, numbers: range, more: float = 0.0) -> None:
    run.record(1, 1e9, str)
    for step in numbers:
        episode = Episode(prompt_ids=[1], response_ids=[2], reward=0.5)
        episode.text = f"answer {step}"
        run.log_rollouts(step, [Group([episode], step, "2", "1 + 1 = ")])
        values = {"reward": step / 7 + more, "train/loss": 1e-5 / (step + 1)}
        run.log(step, Snapshot(), **values, **({"eval/accuracy": step / 8} if step % 2 == 0 else {}))


@pytest.fixture(scope="module")
def tracked(processes, tmp_path_factory) -> Path:
    """A run of 8 steps, tracked by all, which ended after step 5 and was resumed from step 3."""
    root = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        config = {"metrics": metrics(*INSTALLED), "seed": 3, "services": {"x": {"env": {"HF_TOKEN": "hf_1"}}}}
        first = Run("one", config, steps=8, root=str(root))
        steps(first, range(6))
        first.close()
        second = Run("one", config, steps=8, root=str(root), resume="a checkpoint", start=CUT)
        steps(second, range(CUT + 1, 9), AGAIN)
        second.finish()
        second.close()
    return root


def lines(root: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (root / "one" / f"{name}.jsonl").read_text().splitlines()]


def offline_records(folder: Path) -> list:
    """The records of the only offline run in a folder: W&B's file is a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, part, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])  # 1 whole, 2 first, 3 middle, 4 last
        part = data[at + 7 : at + 7 + size] if kind <= 2 else part + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            records.append(Record.FromString(part))
    return records


def offline_rows(folder: Path) -> list[dict]:
    found = [record.history.item for record in offline_records(folder) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in found]


@pytest.mark.full
@needs("wandb")
def test_wandb_offline_values_equal_metrics_file(tracked: Path):
    shown, written = offline_rows(tracked / "one"), lines(tracked, "metrics")
    assert [row["_step"] for row in shown] == [row["step"] for row in written] == list(range(9))
    for ours, theirs in zip(written, shown, strict=True):
        assert {name: theirs[name] for name in ours} == ours
        [path] = (tracked / "one/wandb").glob(f"offline-*/files/{theirs['rollouts/path']}")
        table = json.loads(path.read_text())
        assert dict(zip(table["columns"], table["data"][0], strict=True))["response"] == f"answer {ours['step']:.0f}"
    [run] = [record.run for record in offline_records(tracked / "one") if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.run_id, run.project, run.display_name) == ((tracked / "one/wandb.id").read_text(), "forge", "one")
    assert (config["seed"], config["services"]) == (3, {"x": {"env": {"HF_TOKEN": "***"}}})
    [end] = [record.exit for record in offline_records(tracked / "one") if record.HasField("exit")]
    assert end.exit_code == 0


@pytest.mark.full
@needs("tensorboard")
def test_tensorboard_values_equal_metrics_file(tracked: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(tracked / "one/tensorboard"))
    shown.Reload()
    written = lines(tracked, "metrics")
    assert set(shown.Tags()["scalars"]) == {name for row in written for name in row}
    for name in shown.Tags()["scalars"]:
        ours = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in written if name in row]
        assert [(event.step, event.value) for event in shown.Scalars(name)] == ours


class Listed:
    """A tracker of a user's own."""

    first = 2
    seen: ClassVar[list] = []

    def __init__(self, run) -> None:
        self.name = run.name

    def log(self, step, row, rollouts) -> None:
        if step == 4:
            raise OSError("the disk is full")
        self.seen.append((self.name, step, row.get("eval/accuracy"), [line["response"] for line in rollouts]))

    def close(self, finished: bool) -> None:
        self.seen.append(finished)


def test_failing_custom_tracker_is_dropped_and_training_continues(tmp_path: Path, caplog):
    section = to_dict(MetricsConfig.model_validate({"tracker": f"{__name__}:Listed"}))
    check_trackers(section)
    for name, count in (("one", 4), ("two", 6)):
        run = Run(name, {"metrics": section}, steps=count, root=str(tmp_path))
        steps(run, range(count))
        run.finish()
        run.close()
    seen = [(2, 0.25, ["answer 2"]), (3, None, ["answer 3"])]
    assert Listed.seen == [*(("one", *step) for step in seen), True, *(("two", *step) for step in seen)]
    assert caplog.text.count("metrics.tracker failed with OSError: the disk is full. Training continues") == 1
    with pytest.raises(ValueError, match=r"metrics\.tracker"):
        check_trackers({"tracker": f"{__name__}:Missing"})


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_missing_tracker_package_raises_one_line_error(monkeypatch, name: str):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError) as error:
        check_trackers(metrics(name))
    assert str(error.value) == f"metrics.{name} needs the {name} package: pip install {name}"


@pytest.mark.processes
@needs("wandb")
def test_wandb_without_key_raises_one_line_error(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ValueError, match="run wandb login, set WANDB_API_KEY, or set mode: offline"):
        check_trackers(to_dict(MetricsConfig.model_validate({"wandb": {"project": "forge"}})))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.costly
@needs("wandb")
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_offline_or_disabled_needs_no_key(tmp_path: Path, monkeypatch, caplog, mode: str):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = {"metrics": to_dict(MetricsConfig.model_validate({"wandb": {"project": "forge"}}))}
    check_trackers(config["metrics"])
    run = Run("one", config, steps=4, root=str(tmp_path))
    steps(run, range(4))
    run.finish()
    run.close()
    assert "metrics.wandb" not in caplog.text
    written = offline_rows(tmp_path / "one") if mode == "offline" else []
    assert len(written) == (4 if mode == "offline" else 0)


def test_secrets_in_tracked_config_are_masked():
    config = {
        "env": {"A": "b", "n": "1"}, "judge": {"api_key": "sk-1", "api_key_env": "KEY"}, "headers": {"X-Api-Key": "k"},
        "urls": ["https://user:pass@host/x?api_key=abc&token=d", "https://host/x"], "max_tokens": 3, "token": None,
    }  # fmt: skip
    assert without_secrets(config) == {
        "env": {"A": "***", "n": "***"}, "judge": {"api_key": "***", "api_key_env": "KEY"},
        "headers": {"X-Api-Key": "***"},
        "urls": ["https://***@host/x?api_key=***&token=***", "https://host/x"], "max_tokens": 3, "token": None,
    }  # fmt: skip
