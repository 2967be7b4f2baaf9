"""The trackers show what metrics.jsonl and rollouts.arrow have, read back with each tracker's own means."""

from __future__ import annotations

import json
import struct
import subprocess
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
    "trackio": {"project": "forge"},
    "mlflow": {"experiment": "forge"},
}
INSTALLED = [name for name in SECTIONS if find_spec(name)]
CUT, AGAIN = 3, 10.0  # the step that the run resumes from, and what recomputed rewards differ by


def needs(name: str):
    return pytest.mark.skipif(name not in INSTALLED, reason=f"{name} is not installed")


def metrics(root: Path, *names: str) -> dict:
    section = {name: SECTIONS[name] for name in names}
    if "mlflow" in section:
        section["mlflow"] = {**SECTIONS["mlflow"], "tracking_uri": f"sqlite:///{root}/mlflow.db"}
    return to_dict(MetricsConfig.model_validate(section))


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
        patch.setenv("TRACKIO_DIR", str(root / "trackio"))
        patch.chdir(root)
        config = {"metrics": metrics(root, *INSTALLED), "seed": 3, "services": {"x": {"env": {"HF_TOKEN": "hf_1"}}}}
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


def known(root: Path, name: str) -> str:
    return json.loads((root / "one/trackers.json").read_text())[name]["id"]


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
def test_wandb_offline_has_the_same_values(tracked: Path):
    shown, written = offline_rows(tracked / "one"), lines(tracked, "metrics")
    assert [row["_step"] for row in shown] == [row["step"] for row in written] == list(range(9))
    for ours, theirs in zip(written, shown, strict=True):
        assert {name: theirs[name] for name in ours} == ours
        [path] = (tracked / "one/wandb").glob(f"offline-*/files/{theirs['rollouts/path']}")
        table = json.loads(path.read_text())
        assert dict(zip(table["columns"], table["data"][0], strict=True))["response"] == f"answer {ours['step']:.0f}"
    [run] = [record.run for record in offline_records(tracked / "one") if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.run_id, run.project, run.display_name) == (known(tracked, "wandb"), "forge", "one")
    assert (config["seed"], config["services"]) == (3, {"x": {"env": {"HF_TOKEN": "***"}}})
    [end] = [record.exit for record in offline_records(tracked / "one") if record.HasField("exit")]
    assert end.exit_code == 0


@pytest.mark.full
@needs("mlflow")
def test_mlflow_has_each_step_once(tracked: Path):
    from mlflow import MlflowClient

    client, run = MlflowClient(f"sqlite:///{tracked}/mlflow.db"), known(tracked, "mlflow")
    assert len(client.search_runs([client.get_experiment_by_name("forge").experiment_id])) == 1
    for name in ("reward", "train/loss", "eval/accuracy", "seconds"):
        shown = {metric.step: metric.value for metric in client.get_metric_history(run, name)}
        assert len(shown) == len(client.get_metric_history(run, name))
        ours = {int(row["step"]): row[name] for row in lines(tracked, "metrics") if name in row}
        assert shown.keys() == ours.keys()
        # Steps that it had when the run was resumed keep their first values: MLflow cannot replace any.
        first = {step for step in shown if CUT < step <= 5}
        assert {step: value for step, value in shown.items() if step not in first} == {
            step: value for step, value in ours.items() if step not in first
        }
        if name == "reward":
            assert {step: round(ours[step] - shown[step], 6) for step in first} == dict.fromkeys(first, AGAIN)
    found = client.get_run(run)
    assert (found.info.status, found.info.run_name, found.data.params["seed"]) == ("FINISHED", "one", "3")
    assert found.data.params["services.x.env.HF_TOKEN"] == "***"
    table = json.loads(Path(client.download_artifacts(run, "rollouts/000007.json", str(tracked))).read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True))["response"] == "answer 7"


@pytest.mark.full
@needs("tensorboard")
def test_tensorboard_has_the_same_values(tracked: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(tracked / "one/tensorboard"))
    shown.Reload()
    written = lines(tracked, "metrics")
    assert set(shown.Tags()["scalars"]) == {name for row in written for name in row}
    for name in shown.Tags()["scalars"]:
        ours = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in written if name in row]
        assert [(event.step, event.value) for event in shown.Scalars(name)] == ours


@pytest.mark.full
@pytest.mark.processes
@needs("mlflow")
def test_a_tracker_that_fails_is_a_warning_and_can_be_fed_later(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # where MLflow puts files
    config = {"metrics": metrics(tmp_path / "later", "mlflow")}
    (tmp_path / "later").touch()  # no folder for the database
    run = Run("one", config, steps=4, root=str(tmp_path))
    steps(run, range(4))
    run.finish()
    run.close()
    printed = capfd.readouterr().err
    assert printed.count("metrics.mlflow failed with") == 1
    assert "metrics.mlflow lacks 4 rows of metrics.jsonl: deliver them with python -m" in printed
    assert [row["step"] for row in lines(tmp_path, "metrics")] == [0, 1, 2, 3]
    (tmp_path / "later").unlink()
    later = [sys.executable, "-m", "forge_trackers", str(tmp_path / "one")]
    for _ in range(2):  # the second time there is nothing to deliver
        subprocess.run(later, cwd=tmp_path, check=True)
    from mlflow import MlflowClient

    shown = MlflowClient(f"sqlite:///{tmp_path}/later/mlflow.db").get_metric_history(
        known(tmp_path, "mlflow"), "reward"
    )
    assert [(m.step, m.value) for m in shown] == [(row["step"], row["reward"]) for row in lines(tmp_path, "metrics")]


class Listed:
    """A tracker of a user's own."""

    first = 2
    seen: ClassVar[list] = []

    def __init__(self, run) -> None:
        self.name = run.name

    def log(self, step, row, rollouts) -> None:
        self.seen.append((self.name, step, row.get("eval/accuracy"), [line["response"] for line in rollouts]))

    def close(self, finished: bool) -> None:
        self.seen.append(finished)


def test_a_tracker_of_the_users_own_gets_each_step(tmp_path: Path):
    section = to_dict(MetricsConfig.model_validate({"tracker": f"{__name__}:Listed"}))
    check_trackers(section)
    run = Run("one", {"metrics": section}, steps=4, root=str(tmp_path))
    steps(run, range(4))
    run.finish()
    run.close()
    assert Listed.seen == [("one", 2, 0.25, ["answer 2"]), ("one", 3, None, ["answer 3"]), True]
    with pytest.raises(ValueError, match=r"metrics\.tracker"):
        check_trackers({"tracker": f"{__name__}:Missing"})


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("tensorboard", "tensorboard", "metrics.tensorboard needs the tensorboard package: pip install tensorboard"),
        ("wandb", "wandb", "metrics.wandb needs the wandb package: pip install wandb"),
        ("trackio", "trackio", "metrics.trackio needs the trackio package: pip install trackio"),
        pytest.param(
            *("mlflow", "mlflow", "metrics.mlflow needs the mlflow-skinny package: pip install mlflow-skinny"),
            marks=needs("mlflow"),
        ),
        pytest.param(
            *("mlflow", "alembic", "metrics.mlflow needs the alembic package: pip install alembic"),
            marks=needs("mlflow"),
        ),
    ],
)
def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch, name: str, module: str, message: str):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError) as error:
        check_trackers(metrics(tmp_path, name))
    assert str(error.value) == message


@pytest.mark.processes
@needs("wandb")
def test_wandb_without_a_key_is_one_line(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ValueError, match="run wandb login, set WANDB_API_KEY, or set mode: offline"):
        check_trackers(to_dict(MetricsConfig.model_validate({"wandb": {"project": "forge"}})))


@pytest.mark.processes
@pytest.mark.costly
@needs("wandb")
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_a_run_with_wandb_needs_no_key_where_the_environment_says_so(tmp_path: Path, monkeypatch, caplog, mode: str):
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


def test_secrets_are_not_shown():
    config = {
        "env": {"A": "b", "n": "1"}, "judge": {"api_key": "sk-1", "api_key_env": "KEY"}, "headers": {"X-Api-Key": "k"},
        "urls": ["https://user:pass@host/x?api_key=abc&token=d", "https://host/x"], "max_tokens": 3, "token": None,
    }  # fmt: skip
    assert without_secrets(config) == {
        "env": {"A": "***", "n": "***"}, "judge": {"api_key": "***", "api_key_env": "KEY"},
        "headers": {"X-Api-Key": "***"},
        "urls": ["https://***@host/x?api_key=***&token=***", "https://host/x"], "max_tokens": 3, "token": None,
    }  # fmt: skip
