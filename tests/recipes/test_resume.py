"""Runs that are killed as a whole and gone on with, and everything that cannot be gone on with."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from forge.config import ConfigError, build, to_dict
from forge.models import build_small_model
from forge.observability.metrics import Snapshot
from forge.recipes.launch import launch
from forge.recipes.prepare import prepare_run
from forge.recipes.resume import Start, find_start
from forge.recipes.rl_config import RLConfig as GRPOConfig
from forge.recipes.sft import SFTConfig
from forge.system.checksums import write_checksums, write_sealed
from forge.training.checkpoint import list_checkpoints, read_extra
from tests.recipes.test_recipes import CONFIG, command, finish, rows, run_here, start
from tests.recipes.test_survival import logged_rollouts, wait
from tests.trees import components

BATCH = CONFIG["training"]["batch_size"]


def config(steps: int, every: int, **async_: int) -> dict:
    return CONFIG | {
        "training": CONFIG["training"] | {"steps": steps, "schedule": "cosine"},
        "async": async_,
        "checkpoint": {"every": every},
        "metrics": {"rollouts": BATCH},
    }


def kill_after(folder: Path, step: int, *args: str, controller: bool = False) -> None:
    """Start a run, and once this step is logged kill all of it, or the controller only."""
    process = start(*args, group=True)
    try:
        wait(process, folder, step)
    finally:
        pids = components(process.pid)
        for pid in [process.pid] if controller else [process.pid, *pids]:
            os.kill(pid, signal.SIGKILL)
        process.wait(timeout=20)
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.full
@pytest.mark.processes
def test_killed_lock_step_run_resumes_bit_for_bit(tmp_path):
    settings = config(6, 2, max_policy_age=0)
    for name in ("calm", "hit"):
        (tmp_path / name).mkdir()
    run_here(*command(tmp_path / "calm", config=settings))
    args = command(tmp_path / "hit", "--resume", "auto", config=settings)
    kill_after(tmp_path / "hit", 3, *args)
    code, output = finish(*args)
    assert code == 0, output
    assert "resuming from" in output
    assert [row["step"] for row in rows(tmp_path / "hit")] == list(range(7))
    calm, hit = ((tmp_path / name / "runs/test/model/model.safetensors").read_bytes() for name in ("calm", "hit"))
    assert calm == hit
    assert [sorted(r["index"] for r in logged_rollouts(tmp_path / name)) for name in ("calm", "hit")] == [
        list(range(6 * BATCH))
    ] * 2
    code, output = finish(*args)
    assert code == 0
    assert "is finished" in output
    assert "Monarch" not in output


@pytest.mark.full
@pytest.mark.processes
def test_resumed_async_run_trains_each_prompt_once(tmp_path):
    settings = config(16, 4, max_policy_age=2)
    settings["training"]["sync_interval"] = settings["eval"]["every"] = 2
    args = command(tmp_path, "--checkpoint.async_write", "true", config=settings)
    kill_after(tmp_path, 7, *args, controller=True)
    run = tmp_path / "runs/test"
    before = list_checkpoints(run / "checkpoints")[-1].name
    code, output = finish(sys.executable, "-m", "apps.grpo.main", "--resume", str(run), "--training.steps", "18")
    assert code == 0, output
    assert f"resuming from {run}/checkpoints/{before}" in output
    assert [row["step"] for row in rows(tmp_path)] == list(range(19))
    logged = logged_rollouts(tmp_path)
    assert [rollout["step"] for rollout in logged] == [1 + i // BATCH for i in range(18 * BATCH)]
    indices = {rollout["index"] for rollout in logged}
    assert len(indices) == 18 * BATCH
    dropped = read_extra(list_checkpoints(run / "checkpoints")[-1])["buffer"]["dropped"]
    assert len(set(range(max(indices) + 1)) - indices) <= sum(dropped[why] for why in ("too_old", "forgotten"))
    assert dropped["repeated"] == 0
    assert all(0 <= rollout["step"] - 1 - rollout["version"] <= 2 for rollout in logged)
    assert list_checkpoints(run / "checkpoints")[-1].name == "step_000018"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_resume_on_other_rank_count_gives_equal_losses(tmp_path, first, then):
    settings = {k: v for k, v in config(8, 4).items() if k not in ("grpo", "async", "metrics")}
    settings["training"] = settings["training"] | {"schedule": "constant"}
    settings["eval"] = {"problems": 8, "every": 4, "max_tokens": 8}
    losses = {}
    for name in ("calm", "hit"):
        (tmp_path / name).mkdir()
        args = command(tmp_path / name, "--trainer.procs", str(first), recipe="sft", config=settings)
        code, output = finish(*args, "--training.steps", "4" if name == "hit" else "8")
        assert code == 0, output
        if name == "hit":
            run = str(tmp_path / "hit/runs/test")
            more = ["--resume", run, "--trainer.procs", str(then), "--training.steps", "8"]
            code, output = finish(sys.executable, "-m", "apps.sft.main", *more)
            assert code == 0, output
        losses[name] = [row["train/loss"] for row in rows(tmp_path / name)[1:]]
    assert len(losses["calm"]) == 8
    assert losses["hit"] == pytest.approx(losses["calm"], rel=1e-5, abs=1e-5)


def never(*_):
    raise AssertionError("started")


class Left:
    """A run of step 4 of 6 as it is left behind, and what a command line makes of it."""

    def __init__(self, folder: Path, **sections: dict) -> None:
        self.root, self.folder = folder / "runs", folder / "runs/x"
        plain = {k: v for k, v in CONFIG.items() if k not in ("services", "checkpoint")} | {"checkpoint": {"every": 2}}
        plain["training"] = plain["training"] | {"steps": 6}
        plain |= {"run": {"name": "x", "root": str(self.root)}} | sections
        self.cfg = build(GRPOConfig, plain)
        self.file = folder / "x.yaml"
        self.file.write_text(yaml.safe_dump(to_dict(self.cfg)))
        *_, record = prepare_run(self.cfg, Start())
        for step in range(6):
            record.log(step, Snapshot(), reward=float(step))
        record.close()
        for step in (2, 4):
            self.checkpoint(step).mkdir(parents=True)
            names = (".metadata", "rank_0.pt", "extra.pt")
            for name in names:
                (self.checkpoint(step) / name).write_text(name)
            write_checksums(self.checkpoint(step), names)

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoints/step_{step:06d}"

    def error(self, *argv: str, recipe: type = GRPOConfig) -> str:
        before = {path: path.stat().st_mtime_ns for path in self.folder.rglob("*") if path.name != "lock"}
        with pytest.raises(SystemExit) as caught:
            launch(never, recipe, list(argv))
        message = str(caught.value)
        assert message.startswith("error: ")
        assert "\n" not in message
        after = {path: path.stat().st_mtime_ns for path in self.folder.rglob("*") if path.name != "lock"}
        assert before == after
        return message


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Left(tmp_path_factory.mktemp("left"))


@pytest.fixture
def left(made, tmp_path_factory):
    """A copy for each test, in the same place: a run knows its folder."""
    kept = tmp_path_factory.mktemp("kept")
    shutil.copytree(made.root, kept / "runs")
    yield made
    shutil.rmtree(made.root)
    shutil.copytree(kept / "runs", made.root)


def test_resume_with_changed_settings_error_names_settings(left):
    run, auto = ["--resume", str(left.folder)], ["--config", str(left.file), "--resume", "auto"]
    for argv, message in (
        ([*run, "--seed", "3"], "seed was 0 and is 3; this setting cannot change on resume"),
        ([*auto, "--training.batch_size", "8"], "training.batch_size was 4 and is 8"),
        ([*run, "--grpo.n_samples", "2"], "grpo.n_samples was 4 and is 2"),
        ([*run, "--dataset.difficulty", "[2, 5]"], "dataset.difficulty was"),
        ([*auto, "--async.max_policy_age", "0"], "async.max_policy_age was 1 and is 0"),
        ([*run, "--training.learning_rate", "1"], "training.learning_rate was"),
        ([*run, "--from_scratch.layers", "3"], "from_scratch.layers was 2 and is 3"),
        ([*run, "--from_scratch", "null", "--model", "other"], "model was None and is 'other'"),
        ([*run, "--training.steps", "3"], "the run is at step 4 already, and training.steps is 3"),
        ([*run, "--training.lerning_rate", "1"], "did you mean 'learning_rate'"),
        ([*run, "--run.name", "y"], "omit run.name and run.root"),
        ([*auto, "--checkpoint.every", "0"], "--resume auto needs checkpoint.every"),
        (["--resume", f"{left.folder}s"], "the run directory does not exist"),
        (["--resume", str(left.root)], "not a run directory"),
        (["--resume", "auto"], "--config FILE is missing"),
        (["--config", str(left.file)], f"resume it with --resume {left.folder}"),
    ):
        assert message in left.error(*argv), argv
    assert "unknown key" in left.error(*run, recipe=SFTConfig)


def test_resume_uses_newest_complete_checkpoint(left):
    assert find_start(left.cfg, "auto") == Start(str(left.checkpoint(4)), 4)
    left.checkpoint(4).rename(left.checkpoint(4).with_suffix(".unfinished"))
    assert find_start(left.cfg, str(left.folder)) == Start(str(left.checkpoint(2)), 2)
    left.checkpoint(2).rename(left.checkpoint(2).with_suffix(".unfinished"))
    assert "the run has no checkpoint" in left.error("--resume", str(left.folder))
    assert find_start(left.cfg, "auto") == Start(restart=True)
    left.cfg.checkpoint.every = 0
    write_sealed(left.folder / "config.yaml", yaml.safe_dump(to_dict(left.cfg)))
    left.cfg.checkpoint.every = 2
    message = left.error("--config", str(left.file), "--resume", "auto")
    assert "holds an earlier run without a checkpoint" in message


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "missing"])
@pytest.mark.parametrize("name", [".metadata", "rank_0.pt", "extra.pt", "checksums.txt"])
def test_resume_skips_damaged_checkpoint(left, name, damage, caplog):
    def hurt(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes({"flipped": data, "truncated": data[:-3], "empty": b"", "missing": b""}[damage])
        if damage == "missing":
            path.unlink()

    hurt(left.checkpoint(4) / name)
    assert find_start(left.cfg, "auto") == Start(str(left.checkpoint(2)), 2)
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"{left.checkpoint(4) / name} is " in line
    assert line.endswith("it is now step_000004.damaged, resuming from step_000002")
    assert (left.folder / "checkpoints/step_000004.damaged").is_dir()
    # A second start finds only the one that it resumed from.
    assert find_start(left.cfg, "auto") == Start(str(left.checkpoint(2)), 2)
    assert len(caplog.records) == 1
    hurt(left.checkpoint(2) / name)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"step_000002/{name} is .* there is no older checkpoint"):
            find_start(left.cfg, "auto")


def test_damaged_run_directory_raises_one_line_error(left):
    for name in ("config.yaml", "origin.json"):
        path = left.folder / name
        whole = path.read_bytes()
        for place in range(0, len(whole), 97):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert f"{path} is damaged or was edited" in left.error("--resume", str(left.folder))
        path.write_bytes(whole[: len(whole) // 2])
        assert f"{path} is damaged or was edited" in left.error("--resume", str(left.folder))
        path.write_bytes(whole)


def test_resume_allows_changed_step_and_time_limits(left):
    before = (left.root / "x-initial/model.safetensors").stat().st_mtime_ns
    cfg = build(GRPOConfig, yaml.safe_load(left.file.read_text()))
    cfg.training.steps, cfg.services.trainer.procs, cfg.eval.every, cfg.run.overwrite = 9, 2, 4, True
    *_, record = prepare_run(cfg, find_start(cfg, "auto"))
    assert (record.start, record.resume) == (4, str(left.checkpoint(4)))
    record.log(5, Snapshot(), reward=50.0)
    record.close()
    lines = [json.loads(line) for line in (left.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert lines[-1]["reward"] == 50.0
    assert lines[5]["seconds"] >= lines[4]["seconds"]
    assert yaml.safe_load((left.folder / "config.yaml").read_text())["training"]["steps"] == 9
    assert (left.root / "x-initial/model.safetensors").stat().st_mtime_ns == before
    marks = [
        event["args"]["step"] for event in json.loads((left.folder / "trace.json").read_text()) if event["ph"] == "i"
    ]
    assert marks[-2:] == [5, 5]  # what is done again took its time twice


def test_resuming_a_finished_run_trains_no_step(left):
    *_, record = prepare_run(left.cfg, find_start(left.cfg, "auto"))
    for step in (5, 6):
        record.log(step, Snapshot())
    record.finish()
    record.close()
    left.checkpoint(4).rename(left.checkpoint(6))
    last = Start(str(left.checkpoint(6)), 6)
    assert find_start(left.cfg, "auto") == last  # its model was never written
    (left.folder / "model").mkdir()
    (left.folder / "model/config.json").touch()
    launch(never, GRPOConfig, ["--resume", str(left.folder)])
    more = build(GRPOConfig, yaml.safe_load(left.file.read_text()))
    more.training.steps = 8
    assert find_start(more, "auto") == last


def test_resume_with_changed_model_or_data_raises(tmp_path):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    size = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "max_positions": 64}
    build_small_model(model, seed=0, alphabet="ab>", **size)
    data.write_text('{"question": "a", "answer": "b"}\n')
    sections = {"model": str(model), "from_scratch": None, "eval": {"problems": 0}, "dataset": {"path": str(data)}}
    left = Left(tmp_path, **sections)
    shutil.copytree(model, tmp_path / "moved")
    cfg = build(GRPOConfig, to_dict(left.cfg) | {"model": str(tmp_path / "moved")})
    assert prepare_run(cfg, find_start(cfg, "auto"))[0] == str(tmp_path / "moved")
    data.write_text('{"question": "b", "answer": "b"}\n')
    assert f"{data} has changed since the run started" in left.error("--resume", str(left.folder))
    data.write_text('{"question": "a", "answer": "b"}\n')
    build_small_model(model, seed=1, alphabet="ab>", **size)
    message = left.error("--resume", str(left.folder), "--model", str(model))
    assert f"{model}/model.safetensors has changed since the run started" in message
    shutil.rmtree(model)
    assert "does not exist" in left.error("--resume", str(left.folder), "--model", str(model))


@pytest.mark.processes
def test_resume_of_a_running_run_raises(left):
    hold = f"RunLock({str(left.folder)!r}); print(flush=True); time.sleep(60)"
    code = f"import time; from forge.observability.folder import RunLock; {hold}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        assert f"{left.folder} is in use by process {other.pid}" in left.error("--resume", str(left.folder))
        other.kill()
