"""PromptDataset: sources, order, resumption, prompt formats, and one helpful line for every bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from forge.data.dataset import PromptDataset
from forge.data.prompts import supervised
from forge.data.rewards import MathReward
from forge.data.sources import StreamedRows
from forge.data.tasks import split_of
from forge.data.tokenizer import character_tokenizer

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
ROWS = [{"question": f"q{i}", "answer": f"step\n#### {i}", "id": i} for i in range(23)]
TOKENIZER = character_tokenizer()
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]{{ opening or '' }}"


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The same rows in every form: name -> path."""
    from datasets import Dataset, DatasetDict

    root = tmp_path_factory.mktemp("rows")
    (root / "rows.json").write_text(json.dumps(ROWS))
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    rows = Dataset.from_list(ROWS)
    rows.to_parquet(root / "rows.parquet")
    rows.save_to_disk(root / "saved")
    DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(root / "splits")
    (root / "folder").mkdir()
    rows.select(range(12)).to_parquet(root / "folder" / "train-0.parquet")
    rows.select(range(12, 23)).to_parquet(root / "folder" / "train-1.parquet")
    rows.select(range(5)).to_parquet(root / "folder" / "test-0.parquet")
    return {name: str(root / name) for name in ("rows.json", "rows.jsonl", "rows.parquet", "saved", "splits", "folder")}


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


def make(path=None, **settings):
    return PromptDataset(path, tokenizer=settings.pop("tokenizer", TOKENIZER), **settings)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["rows.json", "rows.jsonl", "rows.parquet", "saved", "splits", "folder"])
def test_every_source_gives_the_same_rows(places, form, streaming):
    data = make(places[form], streaming=streaming, shuffle=False, epochs=1, target_pattern=r"####\s*(.+)")
    samples = list(data)
    assert [(str(s.prompt), s.target, s.prompt.index) for s in samples] == [(f"q{i}", str(i), i) for i in range(23)]
    assert TOKENIZER.decode(list(samples[3].prompt.token_ids)) == "q3"
    assert (data.epoch, data.skipped) == (1, 0)
    assert next(data, None) is None


@pytest.mark.parametrize("form", ["splits", "folder"])
def test_splits(places, form):
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
        "task": lambda: make(task="add", seed=5, max_prompt_tokens=6),
    }


NAMES = list(sources({name: "" for name in ("rows.json", "rows.jsonl", "saved", "folder")}))


@pytest.mark.parametrize("name", NAMES)
def test_resumes_exactly_at_every_position_across_epochs(places, name, monkeypatch):
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
def test_every_epoch_has_an_order_of_its_own(places, streaming):
    epochs = [
        [str(next(data).prompt) for _ in ROWS] for data in [make(places["folder"], streaming=streaming)] for _ in "ab"
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(row["question"] for row in ROWS)
    assert epochs[0] != epochs[1]
    assert [str(s.prompt) for s in islice(make(places["folder"], streaming=streaming), 23)] == epochs[0]
    assert [str(s.prompt) for s in islice(make(places["folder"], streaming=streaming, seed=1), 23)] != epochs[0]


def test_the_end_is_remembered(places):
    data = make(places["rows.jsonl"], epochs=2)
    assert len(list(data)) == 46
    again = make(places["rows.jsonl"], epochs=2)
    again.load_state_dict(data.state_dict())
    assert list(again) == []


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}, {"split": "test"}])
def test_a_position_in_other_data_is_refused(places, change, jsonl):
    state = make(places["rows.jsonl"]).state_dict()
    with pytest.raises(ValueError, match=f"does not fit: {next(iter(change))} was"):
        make(places["rows.jsonl"], **change).load_state_dict(state)
    with pytest.raises(ValueError, match="rows was 23 and is 1"):
        make(jsonl(ROWS[0])).load_state_dict(state)


def test_held_out_is_fixed_and_disturbs_nothing(places):
    for settings in ({"path": places["rows.jsonl"]}, {"path": places["folder"], "streaming": True}):
        data, other = make(**settings), make(**settings)
        first = [next(data) for _ in range(10)]
        held = data.held_out(4)
        assert [(str(s.prompt), s.prompt.index) for s in held] == [(f"q{i}", i) for i in range(4)]
        assert first + [next(data) for _ in range(10)] == list(islice(other, 20))
        assert data.held_out(4) == held
    with pytest.raises(ValueError, match="30 samples asked for, but only 23"):
        make(places["rows.jsonl"]).held_out(30)


def test_held_out_of_a_task_is_the_test_split():
    data = make(task="reverse", difficulty=(3, 6), seed=9, prompt_template="reverse {question} = ")
    held = {str(s.prompt).split()[1] for s in data.held_out(100)}
    drawn = [next(data) for _ in range(500)]
    assert len(held) == 100
    assert all(split_of(word) == "test" for word in held)
    assert not held & {str(s.prompt).split()[1] for s in drawn}
    assert all(s.target == str(s.prompt).split()[1][::-1] for s in drawn)


def test_too_long_prompts_are_skipped_and_counted(places):
    data = make(places["rows.jsonl"], max_prompt_tokens=2, epochs=1)
    assert sorted(str(s.prompt) for s in data) == [f"q{i}" for i in range(10)]
    assert (data.skipped, data.served) == (13, 10)


def test_templates_fields_and_numbers(jsonl):
    path = jsonl({"problem": "2+2", "hint": "even", "solution": 4}, {"problem": "3", "hint": 1, "solution": 2.5})
    data = make(path, target_field="solution", prompt_template="{hint}: {question} {{x}}\n", shuffle=False)
    assert [(str(s.prompt), s.target) for s in data.held_out(2)] == [("even: 2+2 {x}\n", "4"), ("1: 3 {x}\n", "2.5")]
    assert (
        next(make(path, target_field=None, prompt_field="hint", shuffle=False))
        == (make(path, target_field=None, prompt_template="{hint}").held_out(1)[0])
    )


def test_chat_template(jsonl):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    settings = {"tokenizer": tokenizer, "chat_template": True}
    sample = next(make(jsonl(ROWS[0]), system_prompt="Be brief.", prompt_template="{question}?", **settings))
    assert str(sample.prompt) == "[system]Be brief.[user]q0?[assistant]"
    assert tokenizer.decode(list(sample.prompt.token_ids)) == str(sample.prompt)
    opened = next(make(jsonl(ROWS[0]), chat_options={"opening": "<think>"}, **settings))
    assert str(opened.prompt) == "[user]q0[assistant]<think>"


def test_supervised_marks_the_answer_and_eos():
    sample = next(make(task="add", prompt_template="{question}="))
    tokens, mask = supervised(sample, TOKENIZER)
    assert TOKENIZER.decode([t for t, own in zip(tokens, mask, strict=True) if own]) == sample.target + "<eos>"
    assert TOKENIZER.decode([t for t, own in zip(tokens, mask, strict=True) if not own]) == str(sample.prompt)
    endless = character_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        supervised(sample, endless)


ROW = {"question": "one", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([ROW, '{"question": '], {}, r"data.jsonl, line 2: not JSON"),
        ([ROW, "", "[1]"], {}, r"data.jsonl, line 3: a row must be an object, not list"),
        ([ROW, {"question": "two", "label": 2}], {}, r"row 2: no field 'answer': it has question, label"),
        ([{"text": "a", "answer": 1}], {}, r"row 1: no field 'question': it has text, answer"),
        ([ROW], {"prompt_field": "prompt"}, r"row 1: no field 'prompt': it has question, answer"),
        ([ROW, {"question": None, "answer": 1}], {}, r"row 2: field 'question' must be text or a number, not NoneType"),
        ([ROW, {"question": " ", "answer": 1}], {}, r"row 2: the prompt is empty"),
        ([], {}, "is empty: it has no rows"),
        ([ROW], {"max_prompt_tokens": 2}, r"all of 1 prompts are longer than max_prompt_tokens=2"),
        ([ROW, {"question": "three", "answer": 3}], {"max_prompt_tokens": 3, "too_long": "error"},
         r"row 2: the prompt has 5 tokens, max_prompt_tokens is 3"),
        ([ROW], {"prompt_template": "{qestion}"}, r"row 1: no field 'qestion': it has question, answer"),
        ([ROW], {"prompt_template": r"\boxed{} {question}"}, "write {{ and }} for braces"),
        ([ROW], {"prompt_template": "{question"}, "write {{ and }} for braces"),
        ([ROW], {"prompt_template": "{question.__class__}"}, "braces hold one field name"),
        ([ROW], {"target_pattern": r"####\s*(.+)"}, r"row 1: target_pattern .* finds nothing in '1'"),
        ([ROW], {"target_pattern": "####"}, "needs a group"),
        ([ROW], {"target_pattern": "("}, "not a regular expression"),
        ([ROW], {"target_pattern": "(.)", "target_field": None}, "needs a target_field"),
        ([ROW], {"chat_template": True}, "the tokenizer has no chat template"),
        ([ROW], {"system_prompt": "Hi"}, "need chat_template: true"),
        ([ROW], {"too_long": "cut"}, "must be 'skip' or 'error', not 'cut'"),
        ([ROW], {"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        ([ROW], {"epochs": 0}, "epochs must be at least 1"),
        ([ROW], {"task": "add"}, "either a path or a task"),
    ],
)  # fmt: skip
def test_bad_input_says_what_is_wrong(jsonl, rows, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(jsonl(*rows), **settings)
    assert "\n" not in str(caught.value)


def test_bad_settings_without_a_path():
    for settings, message in (
        ({}, "either a path or a task"),
        ({"task": "ad"}, "did you mean 'add'"),
        ({"task": "add", "epochs": 2}, "endless"),
        ({"task": "add", "difficulty": 0}, "difficulty"),
        ({"task": "add", "prompt_template": "{a}"}, "no field 'a': it has question, answer"),
        ({"task": "add", "max_prompt_tokens": 1}, "all of 1000 prompts are longer"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**settings)


def test_bad_files(tmp_path, places):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no such file: .*trian.jsonl .*did you mean .*/train.jsonl\?"):
        make(str(tmp_path / "trian.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"no such file: nowhere/at/all"):
        make("nowhere/at/all")
    (tmp_path / "rows.csv").write_text("question,answer\n")
    with pytest.raises(ValueError, match=r"unknown extension '.csv': use .json, .jsonl, .parquet"):
        make(str(tmp_path / "rows.csv"))
    for content, message in (
        ("{}", "must hold a list of objects, not dict"),
        ("[1]", "row 1: a row must be an object, not int"),
        ("[", r"not JSON: .*\.jsonl"),
        ("[]", "is empty"),
    ):
        (tmp_path / "rows.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            make(str(tmp_path / "rows.json"))
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(ValueError, match="is not a parquet file"):
        make(str(tmp_path / "rows.parquet"))
    with pytest.raises(ValueError, match="no field 'label': it has question, answer, id"):
        make(places["folder"], target_field="label", streaming=True)


def test_a_hub_id_without_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'openai/gsm8k'.*pip install torchforge\[data\]"):
        make("openai/gsm8k")


def test_a_hub_id_without_the_hub_names_the_dataset():
    with pytest.raises(OSError, match="cannot load the dataset 'nobody/nothing'"):
        make("nobody/nothing")


def test_a_dataset_with_configurations(tmp_path):
    for name, answer in (("main", "right"), ("other", "wrong")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"question": "q", "answer": answer}))
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_dir: main\n- config_name: other\n  data_dir: other\n---\n"
    )
    assert next(make(str(tmp_path))).target == "right"
    assert next(make(str(tmp_path), subset="other", streaming=True)).target == "wrong"


@pytest.mark.skipif(not GSM8K.exists(), reason="no GSM8K in ../shared/data")
def test_gsm8k():
    data = make(str(GSM8K / "test.jsonl"), target_pattern=r"####\s*(.+)", max_prompt_tokens=300)
    for sample in data.held_out(200):
        assert len(sample.prompt.token_ids) <= 300
        assert MathReward()(str(sample.prompt), f"The answer is {sample.target}.", sample.target) == 1.0


def test_importing_the_data_package_stays_light():
    program = (
        "import sys; import forge.data.dataset, forge.data.rewards, forge.data.tokenizer;"
        "print({'torch', 'monarch', 'transformers', 'datasets', 'math_verify', 'sympy'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "set()"
