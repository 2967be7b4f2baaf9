"""PromptDataset: sources, order, resumption, and one helpful line for a file that cannot be read."""

import json
import sys
from itertools import islice

import pytest

from forge.data.files import Rows, open_rows, open_stream
from forge.data.sources import StreamedRows
from tests.data.rows import ROWS, TOKENIZER, make

pytestmark = pytest.mark.usefixtures("offline")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["rows.json", "rows.jsonl", "rows.parquet", "saved", "splits", "folder"])
def test_every_dataset_file_format_yields_same_samples(places, form, streaming):
    data = make(places[form], streaming=streaming, shuffle=False, epochs=1, target_pattern=r"####\s*(.+)")
    samples = list(data)
    assert [(str(s.prompt), s.target, s.prompt.index) for s in samples] == [(f"q{i}", str(i), i) for i in range(23)]
    assert TOKENIZER.decode(list(samples[3].prompt.token_ids)) == "q3"
    assert (data.epoch, data.skipped) == (1, 0)
    assert next(data, None) is None


@pytest.mark.parametrize("form", ["splits", "folder"])
def test_named_dataset_split_is_read_and_unknown_split_raises(places, form):
    assert len(list(make(places[form], split="test", epochs=1))) == 5
    with pytest.raises(ValueError, match="nosuch"):
        make(places[form], split="nosuch")


def sources(places):
    return {
        "stored": lambda: make(places["rows.jsonl"], seed=3),
        "ordered": lambda: make(places["rows.jsonl"], shuffle=False),
        "finite": lambda: make(places["rows.json"], epochs=3),
        "skipping": lambda: make(places["rows.jsonl"], max_prompt_tokens=2),
        "saved": lambda: make(places["saved"]),
        "streamed": lambda: make(places["folder"], streaming=True, seed=3),
        "streamed in order": lambda: make(places["folder"], streaming=True, shuffle=False),
        "streamed file": lambda: make(places["rows.jsonl"], streaming=True, max_prompt_tokens=2),
        "task": lambda: make(task="apps.toys.numbers:Add", seed=5, max_prompt_tokens=6),
    }


NAMES = list(sources({name: "" for name in ("rows.json", "rows.jsonl", "saved", "folder")}))
COSTLY = ("streamed", "streamed in order")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in COSTLY else name for name in NAMES]
)
def test_dataset_resumes_exactly_at_every_position(places, name, monkeypatch):
    monkeypatch.setattr(StreamedRows.__init__, "__kwdefaults__", {"block": 7})
    new = sources(places)[name]
    data, states, samples = new(), [], []
    for _ in range(55):
        states.append(json.dumps(data.state_dict()))
        samples.append(next(data))
    assert [s.prompt.index for s in samples] == list(range(55))
    for position, state in enumerate(states):
        if "streamed" in name and position % 4:
            continue
        resumed = new()
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        assert list(islice(resumed, min(30, 55 - position))) == samples[position : position + 30]
    used = new()
    list(islice(used, 20))
    used.load_state_dict(json.loads(states[4]))
    assert list(islice(used, 51)) == samples[4:]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_dataset_epoch_is_shuffled_differently(places, streaming):
    epochs = [
        [str(next(data).prompt) for _ in ROWS] for data in [make(places["folder"], streaming=streaming)] for _ in "ab"
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(row["question"] for row in ROWS)
    assert epochs[0] != epochs[1]
    assert [str(s.prompt) for s in islice(make(places["folder"], streaming=streaming), 23)] == epochs[0]
    assert [str(s.prompt) for s in islice(make(places["folder"], streaming=streaming, seed=1), 23)] != epochs[0]


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}, {"split": "test"}])
def test_resuming_dataset_with_state_of_other_data_raises(places, change, jsonl):
    state = make(places["rows.jsonl"]).state_dict()
    with pytest.raises(ValueError, match=f"saved data position is of {next(iter(change))} "):
        make(places["rows.jsonl"], **change).load_state_dict(state)
    with pytest.raises(ValueError, match="rows 23, but it is 1 now"):
        make(jsonl(ROWS[0])).load_state_dict(state)


def test_held_out_dataset_rows_are_fixed_and_do_not_move_position(places):
    for settings in ({"path": places["rows.jsonl"]}, {"path": places["folder"], "streaming": True}):
        data, other = make(**settings), make(**settings)
        first = [next(data) for _ in range(10)]
        held = data.held_out(4)
        assert [(str(s.prompt), s.prompt.index) for s in held] == [(f"q{i}", i) for i in range(4)]
        assert first + [next(data) for _ in range(10)] == list(islice(other, 20))
        assert data.held_out(4) == held
    with pytest.raises(ValueError, match="30 held-out samples are needed, but only 23"):
        make(places["rows.jsonl"]).held_out(30)


def test_too_long_prompts_are_skipped_and_counted(places):
    data = make(places["rows.jsonl"], max_prompt_tokens=2, epochs=1)
    assert sorted(str(s.prompt) for s in data) == [f"q{i}" for i in range(10)]
    assert (data.skipped, data.served) == (13, 10)


def test_unreadable_data_file_error_names_path(tmp_path, places):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no such file: .*trian.jsonl .*did you mean .*/train.jsonl\?"):
        make(str(tmp_path / "trian.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"no such file: nowhere/at/all"):
        make("nowhere/at/all")
    (tmp_path / "rows.xml").write_text("<a/>")
    with pytest.raises(
        ValueError, match=r"unsupported extension '.xml': use .json, .jsonl, .csv, .tsv, .parquet, or pass"
    ):
        make(str(tmp_path / "rows.xml"))
    for content, message in (
        ("{}", "must contain a JSON list of objects, not dict"),
        ("[1]", "row 1: a row must be an object, not int"),
        ("[", r"invalid JSON: .*\.jsonl"),
        ("[]", "is empty"),
    ):
        (tmp_path / "rows.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            make(str(tmp_path / "rows.json"))
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(ValueError, match="is not a parquet file"):
        make(str(tmp_path / "rows.parquet"))
    with pytest.raises(ValueError, match="no field 'label': the row has question, answer, id"):
        make(places["folder"], target_field="label", streaming=True)


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": 12345678901234567890123}, {"a": 2}, {"a": 2.5}],
        [{"a": {"b": 1, "c": None}}, {"a": {"d": [1, "t", {}]}}],
        [{"a": "2020-01-01"}, {"b": True}, {"a": None, "b": "no"}],
    ],
)
@pytest.mark.parametrize("place", ["rows.jsonl", "rows.json", "folder"])
@pytest.mark.parametrize("read", [open_rows, open_stream])
def test_json_dataset_rows_keep_values_and_types(offline, tmp_path, rows, place, read):
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for name in ("rows.jsonl", "folder/train.jsonl"):
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = list(read(str(tmp_path / place), split="train"))
    assert [repr(row) for row in found] == [repr(row) for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "delimiter"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_csv_and_tsv_cells_are_read_as_exact_text(tmp_path, name, delimiter, streaming):
    cells = [["question", "answer"], ['"a\n,\tb"', "007"], ["q", "NA"], ["r", "1.50"]]
    (tmp_path / name).write_text("\n".join(delimiter.join(row) for row in cells), encoding="utf-8-sig")
    data = make(str(tmp_path / name), shuffle=False, epochs=1, streaming=streaming)
    assert [(str(sample.prompt), sample.target) for sample in data] == [("a\n,\tb", "007"), ("q", "NA"), ("r", "1.50")]
    for content, fault in (
        ("a,a\n1,2", "row 1: 2 cells"),
        ("a,b\n1", "row 1: 1 cells"),
        ('a\n"', "line 2"),
        ("", "empty"),
    ):
        (tmp_path / "bad.csv").write_text(content)
        with pytest.raises(ValueError, match=fault):
            make(str(tmp_path / "bad.csv"))


@pytest.mark.parametrize("split", ["train[:1]", "validation", "nosuch"])
@pytest.mark.parametrize("form", ["rows.json", "rows.jsonl", "rows.parquet", "saved", Rows(ROWS)])
@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_split_of_rows_without_splits_raises(places, split, form, streaming):
    with pytest.raises(ValueError, match="has no split"):
        make(places.get(form, form) if isinstance(form, str) else form, split=split, streaming=streaming)


@pytest.mark.parametrize("form", ["rows", "saved", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_class_labels_are_read_as_label_names(offline, tmp_path, form, streaming):
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"question": Value("string"), "answer": ClassLabel(names=["no", "yes"])})
    rows = Dataset.from_dict({"question": ["a", "b", "c"], "answer": [1, 0, -1]}, features)
    rows.save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "rows.parquet")
    path = {"rows": Rows(rows), "saved": str(tmp_path / "saved"), "parquet": str(tmp_path / "rows.parquet")}[form]
    kept = make(path, shuffle=False, streaming=streaming, checked=True)
    assert [next(kept).target for _ in range(3)] == ["yes", "no", "yes"]  # the row without a label is left out


def test_dataset_hub_id_without_datasets_package_names_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'openai/gsm8k'.*pip install datasets"):
        make("openai/gsm8k")


def test_unreachable_hub_error_names_dataset():
    with pytest.raises(OSError, match="cannot load the dataset 'nobody/nothing'"):
        make("nobody/nothing")
