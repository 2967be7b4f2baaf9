"""What makes a row one that cannot be trained, found before anything else; and rows as they were before columns."""

import json
import logging
from itertools import islice

import pytest

from forge.data.files import Rows
from forge.data.load import load_data
from forge.data.preferences import PreferenceDataset
from forge.data.prompts import PromptDataset
from forge.data.supervised import SupervisedDataset
from forge.models.tokenizer import character_tokenizer
from tests.data.rows import TOKENIZER
from tests.data.templates import CHATML, byte_pairs
from tests.data.test_turns import CALLS

GOOD = {"question": "one", "answer": "1"}
LONE = "\ud83d"


def said(answer):
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]}


def called(*arguments):
    """A conversation with tool calls of these arguments."""
    calls = [{"function": {"name": f"f{number}", "arguments": given}} for number, given in enumerate(arguments)]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"messages": [{"role": "user", "content": "hi"}, answer]}


CHAT = {"tokenizer": byte_pairs(), "chat_template": CHATML}
TOOLS = {"tokenizer": byte_pairs(), "chat_template": CALLS.replace("FORM", "c.function.arguments | tojson")}


@pytest.mark.parametrize(
    ("kind", "good", "bad", "settings", "message"),
    [
        ("supervised", {"text": "a"}, {"text": "  "}, {"text_field": "text"}, "the text is empty"),
        ("supervised", {"text": "a"}, {"text": f"a {LONE}"}, {"text_field": "text"}, "lone surrogate"),
        ("supervised", {"text": "a"}, {"text": None}, {"text_field": "text"}, "must be text or a number, not NoneType"),
        ("supervised", said("a"), said(LONE), CHAT, "message 2.content has the lone surrogate"),
        ("supervised", said("a"), {"messages": [{"role": "user", "content": "a"}]}, CHAT, "no assistant"),
        ("supervised", called({"a": 1}), called({"a": {"b": [float("nan")]}}), TOOLS, "arguments.a.b is nan"),
        ("supervised", called({"a": 1}), called({LONE: 1}), TOOLS, "lone surrogate"),
        (
            "supervised",
            said("a"),
            {**said("a"), "tools": [{"name": LONE}]},
            CHAT,
            "function.name has the lone surrogate",
        ),
        ("supervised", said("a"), {"messages": "hi"}, CHAT, "must be a list of messages"),
        (
            "supervised",
            called({"a": 1}),
            called(3) | {"tools": "[1"},
            TOOLS,
            "the tools of a conversation are invalid JSON",
        ),
        ("supervised", GOOD, {"question": "two", "answer": float("-inf")}, {}, "field 'answer' is -inf"),
        (
            "prompts",
            GOOD,
            {"question": "two", "answer": float("nan")},
            {},
            "field 'answer' is nan: fill in the missing",
        ),
        ("prompts", GOOD, {"question": float("inf"), "answer": 1}, {}, "field 'question' is inf"),
        ("prompts", GOOD, {"question": "two", "answer": None}, {}, "not NoneType: fill in the missing value"),
        ("prompts", GOOD, {"question": "two", "answer": LONE}, {}, "field 'answer' has the lone surrogate"),
        ("prompts", GOOD, {"question": LONE, "answer": ""}, {}, "field 'question' has the lone surrogate"),
        ("preferences", {"chosen": "ab", "rejected": "ac"}, {"chosen": "x", "rejected": "y"}, {}, "no common start"),
        ("preferences", {"chosen": "ab", "rejected": "ac"}, {"chosen": "ab", "rejected": " "}, {}, "the text is empty"),
        (
            "preferences",
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            {"prompt": "q", "chosen": "a", "rejected": float("nan")},
            {},
            "field 'rejected' is nan",
        ),
    ],
)
@pytest.mark.parametrize("form", ["rows", "jsonl"])
def test_untrainable_dataset_row_error_names_row_number(jsonl, kind, good, bad, settings, message, form):
    rows = [good] * 9 + [bad]
    path = Rows(rows) if form == "rows" else jsonl(*rows)
    with pytest.raises(ValueError, match=message) as caught:
        load_data(**{"tokenizer": TOKENIZER, "kind": kind, "path": path, **settings})
    assert ", row 10: " in str(caught.value)
    assert "\n" not in str(caught.value)


CALLED = [
    called({"x": 1}, {"y": 2}),
    called({"z": {"deep": [{"a": 1}, {"b": None, "c": "c"}]}}),
    called({"x": 0, "flag": False}),
]


@pytest.mark.parametrize("form", ["parquet", "saved", "folder", "streamed", "dataset"])
def test_rows_stored_in_columns_do_not_gain_keys_of_other_rows(offline, tmp_path, form):
    from datasets import Dataset

    columns = Dataset.from_list(CALLED)
    if form == "saved":
        columns.save_to_disk(tmp_path / "rows")
    (tmp_path / "rows").mkdir(exist_ok=True)
    if form in ("parquet", "folder", "streamed"):
        columns.to_parquet(tmp_path / "rows" / "rows.parquet")
    path = str(tmp_path / "rows" / ("" if form in ("saved", "folder") else "rows.parquet"))
    settings = {**TOOLS, "shuffle": False, "streaming": form == "streamed"}
    data = SupervisedDataset(Rows(columns) if form == "dataset" else path, **settings)
    texts = [TOOLS["tokenizer"].decode(episode.tokens) for episode in islice(data, 3)]
    assert '<call>f0 {"x": 1}</call><call>f1 {"y": 2}</call>' in texts[0]
    assert '<call>f0 {"z": {"deep": [{"a": 1}, {"c": "c"}]}}</call>' in texts[1]
    assert '<call>f0 {"flag": false, "x": 0}</call>' in texts[2].replace(
        '{"x": 0, "flag": false}', '{"flag": false, "x": 0}'
    )


@pytest.fixture
def stream(monkeypatch):
    """A stream of these rows, as from the hub."""

    class Streamed(list):
        def state_dict(self):
            return {}

        def load_state_dict(self, state): ...

    def open_stream(rows):
        monkeypatch.setattr("forge.data.stream.open_stream", lambda path, **_: Streamed(rows))
        return {"path": "some/set", "streaming": True, "shuffle": False, "tokenizer": TOKENIZER}

    return open_stream


@pytest.mark.parametrize(
    "bad",
    [{"question": " ", "answer": 1}, {"question": "q", "answer": None}, {"q": 1}, {"question": LONE, "answer": 1}],
)
def test_invalid_row_of_dataset_stream_is_skipped_and_counted(stream, caplog, bad):
    data = PromptDataset(**stream([GOOD, GOOD, bad, GOOD]), epochs=2)
    assert len(list(data)) == 6
    assert (data.served, data.skipped) == (6, 2)
    assert "skipped a row: some/set, row 3: " in caplog.text


def test_dataset_stream_of_invalid_rows_raises_at_start(stream):
    with pytest.raises(ValueError, match="some/set, row 1: no field 'question': the row has text"):
        PromptDataset(**stream([{"text": "a"}] * 5))


@pytest.mark.parametrize(
    ("questions", "count", "first"),
    [(["ab", "añb"], "1 of 2", 2), (["XY"] * 3, "3 of 3", 1), (["a b"], "1 of 1", 1), (["a\n"], "1 of 1", 1)],
)
def test_prompts_with_characters_missing_in_vocabulary_warn(caplog, questions, count, first):
    rows = [{"question": question, "answer": "a"} for question in questions]
    PromptDataset(Rows(rows), tokenizer=character_tokenizer("ab"))
    [record] = [record for record in caplog.records if "encodes as unknown" in record.message]
    assert record.levelno == logging.WARNING
    assert f"{count} prompts have characters" in record.message
    assert record.message.endswith(f"(first: row {first})")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("streaming", [False, True])
def test_byte_order_mark_of_jsonl_is_skipped(offline, tmp_path, encoding, name, streaming):
    rows = [{"question": "größer", "answer": "ß"}, GOOD]
    text = json.dumps(rows) if name == "rows.json" else "\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (tmp_path / name).write_text(text, encoding=encoding)
    data = PromptDataset(str(tmp_path / name), tokenizer=TOKENIZER, shuffle=False, streaming=streaming)
    assert [sample.target for sample in islice(data, 2)] == ["ß", "1"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    ("encoding", "fault"),
    [
        ("latin-1", "the byte 0xf6 is not UTF-8"),
        ("cp1252", "the byte 0xf6 is not UTF-8"),
        ("utf-16", "it is in UTF-16"),
        ("shift_jis", "the byte 0x8a is not UTF-8"),
        ("utf-32", "it is in UTF-16"),
    ],
)
def test_dataset_file_that_is_not_utf8_raises_with_line_number(tmp_path, name, encoding, fault):
    word = "漢" if encoding == "shift_jis" else "größer"
    (tmp_path / name).write_text(f'{json.dumps(GOOD)}\n{{"question": "{word}", "answer": ""}}\n', encoding=encoding)
    line = 1 if encoding in ("utf-16", "utf-32") else 2
    with pytest.raises(ValueError, match=rf"{name}, line {line}: {fault}: save the file as UTF-8"):
        PromptDataset(str(tmp_path / name), tokenizer=TOKENIZER)


def test_dataset_size_counts_items_of_all_epochs(jsonl):
    rows = jsonl(*[{"question": f"q{i}", "answer": i} for i in range(7)])
    learn = {"tokenizer": TOKENIZER, "epochs": 3}
    assert SupervisedDataset(rows, **learn).size == 21
    assert SupervisedDataset(rows, tokenizer=TOKENIZER).size is None
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert PreferenceDataset(Rows([pair, {**pair, "rejected": "a"}]), tokenizer=TOKENIZER, epochs=2).size == 2
    for weights in ([3, 1], [1, 1], [1, 2.5]):
        sources = [{"path": rows, "weight": weights[0]}, {"path": Rows([GOOD] * 4), "weight": weights[1]}]
        mixture = load_data(TOKENIZER, kind="supervised", sources=sources, epochs=1)
        assert mixture.size == len(list(mixture))
