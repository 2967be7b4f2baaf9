"""The audit of a run: clean runs pass, also after deaths; what is skipped or doubled is found."""

import itertools
import json
import shutil

import pyarrow as pa
import pytest

import forge
from benchmarks.agent_soak import kill
from forge.cli import main
from forge.observability.rollouts import ROLLOUTS, make_schema, read_batches
from forge.observability.schedule import SCHEDULE
from forge_inspect.alerts import AUDIT, folder_alerts
from forge_inspect.audit import audit_run

SETTINGS = {
    "from_scratch": {"alphabet": "abcdefghijkl>", "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1},
    "dataset": {"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"},
    "reward": "CharacterMatch",
    "training": {"batch_size": 4, "steps": 8, "learning_rate": 1e-3, "seq_len": 256},
    "grpo": {"n_samples": 4, "max_tokens": 8},
    "async": {"max_policy_age": 2},
    "checkpoint": {"every": 2},
    "metrics": {"rollouts": "all"},
}


pytestmark = pytest.mark.full


def train(root, **overrides):
    return forge.train(None, name="run", run={"root": str(root)}, **{**SETTINGS, **overrides}).folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train(tmp_path_factory.mktemp("audited"), algorithm="dapo")


def rewrite(folder, target, change):
    """A copy of a run whose recorded rows `change` has edited."""
    shutil.copytree(folder, target)
    (target / "logs.txt").unlink()  # whose checksums would say at once that the file was edited
    rows = [row for _, batch in read_batches(folder / ROLLOUTS) for row in batch.to_pylist()]
    rows = change(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, make_schema()) as writer:
        for _, step in itertools.groupby(rows, key=lambda row: row["step"]):
            writer.write_batch(pa.RecordBatch.from_pylist(list(step), schema=make_schema()))
    (target / ROLLOUTS).write_bytes(sink.getvalue().to_pybytes()[:-8])
    return target


@pytest.mark.processes
def test_audit_of_clean_run_has_no_faults(folder, capsys):
    result = audit_run(folder)
    assert (result.faults, result.counts["groups trained"]) == ([], 8 * 4)
    assert result.counts["tokens trained"] > 0
    main(["audit", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["is_sound"] is True


def first_trained(rows):
    return next(number for number, row in enumerate(rows) if row["dropped"] is None)


def skip(rows):
    gone = sorted({row["group"] for row in rows if row["dropped"] is None})[2]
    return [row for row in rows if row["group"] != gone]


def double(rows):
    first = [row for row in rows if row["step"] == 1 and row["dropped"] is None]
    again = [row | {"step": 2} for row in first if row["group"] == first[0]["group"]]
    return [*(row for row in rows if row["step"] <= 2), *again, *(row for row in rows if row["step"] > 2)]


def unscored(rows):
    return [row | ({"reward": None} if number == first_trained(rows) else {}) for number, row in enumerate(rows)]


def failed(rows):
    return [
        row | ({"finish": "infrastructure", "reward": 0.0} if number == 5 else {}) for number, row in enumerate(rows)
    ]


def stale(rows):
    return [row | ({"versions": [0] * len(row["versions"])} if row["step"] == 8 else {}) for row in rows]


def other_weights(rows):
    origins = json.dumps([[0, "f" * 32, "generator[9]"]])
    return [row | ({"origins": origins} if number == 1 else {}) for number, row in enumerate(rows)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (skip, "trained 3 groups, and training.batch_size is 4"),
        (double, "groups were trained in several steps"),
        (unscored, "episodes without a reward were trained"),
        (failed, "episodes that failed were trained"),
        (stale, "trained tokens of version 0: the bound is 2"),
        (other_weights, "versions have several identities of weights: 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_audit_names_each_injected_fault(folder, tmp_path, change, fault):
    result = audit_run(rewrite(folder, tmp_path / "run", change))
    assert any(fault in text for text in result.faults), result.faults
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["audit", str(tmp_path / "run")])


@pytest.mark.processes
def test_audit_names_edited_run_file(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    text = (tmp_path / "run/metrics.jsonl").read_text()
    (tmp_path / "run/metrics.jsonl").write_text(text.replace('"reward"', '"rewarf"', 1))
    assert any("metrics.jsonl is not what the run wrote" in fault for fault in audit_run(tmp_path / "run").faults)


@pytest.mark.processes
@pytest.mark.slow
def test_audit_of_interrupted_run_has_no_faults(tmp_path):
    """Twenty interruptions: by an error in the controller, with deaths of generator and trainer in between."""
    numbers = itertools.count(1)

    def interrupted(step, metrics):
        number = next(numbers)
        if number % 5 == 0:
            kill("generator" if number % 2 else "trainer")
        if number % 4 == 0:
            raise KeyError("interrupted")

    settings = {"steps": 60, "algorithm": "dapo", "services": {"generator": {"max_restarts": 50}}}
    for _ in range(20):
        with pytest.raises(KeyError, match="interrupted"):
            train(tmp_path, resume="auto", on_step=interrupted, **settings)
        assert audit_run(tmp_path / "run").faults == []
    assert max(row["step"] for row in forge.Result(tmp_path / "run").metrics) > 20


@pytest.mark.processes
@pytest.mark.parametrize("words", [["audit", "nowhere"]])
def test_audit_of_missing_run_raises(words):
    with pytest.raises(SystemExit, match="is not a run that has made a step"):
        main(words)


@pytest.mark.processes
def test_audit_from_schedule_equals_audit_from_rollouts(folder, tmp_path):
    by_rollouts = audit_run(folder)
    by_schedule = audit_run(folder, by_schedule=True)
    assert (by_schedule.faults, by_schedule.counts) == ([], by_rollouts.counts)
    assert json.loads((folder / AUDIT).read_text()) == json.loads(by_schedule.json())
    assert folder_alerts(folder) == []


@pytest.mark.full
@pytest.mark.processes
def test_run_without_recorded_rollouts_is_audited_by_schedule(tmp_path):
    folder = train(tmp_path, metrics={"rollouts": 0})
    assert (audit_run(folder).faults, audit_run(folder).counts["groups trained"]) == ([], 8 * 4)
    lines = [json.loads(line) for line in (folder / SCHEDULE).read_text().splitlines()]
    (third,) = (line for line in lines if line["step"] == 3 and "groups" in line)
    (fifth,) = (line for line in lines if line["step"] == 5 and "groups" in line)
    third["groups"][0] = fifth["groups"][0]  # one prompt twice, another one never
    fifth["groups"][1][2][0][2] = None  # a failure in a gradient
    (folder / SCHEDULE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    faults = " ".join(audit_run(folder).faults)
    assert "groups were trained in several steps" in faults
    assert "episodes without a reward were trained" in faults
    assert "schedule.jsonl is not what the run wrote" in faults
    (folder / AUDIT).write_text(audit_run(folder).json())
    assert "trained twice" in folder_alerts(folder)[0].finding
