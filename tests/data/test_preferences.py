"""Pairs of answers: one context, two answers, in every form that rows have; and the mistakes of procedural tasks."""

import json
from itertools import islice
from random import Random

import pytest
from hypothesis import given, strategies as st

from apps.toys.mistakes import mistake
from apps.toys.tasks import split_of
from forge.data.packing import pack
from forge.data.preferences import PreferenceDataset
from forge.data.sources import load_task
from tests.data.rows import TASKS, TOKENIZER
from tests.data.templates import CHATML, CHATML_MARKED, byte_pairs

pytestmark = pytest.mark.usefixtures("offline")
TALK = "{% for m in messages %}{{ m.content }}{{ '>' if m.role == 'user' else eos_token }}{% endfor %}"


def prefer(path=None, **settings):
    return PreferenceDataset(path, tokenizer=settings.pop("tokenizer", TOKENIZER), **settings)


def said(*contents):
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]


def read(pair, tokenizer=TOKENIZER):
    """The context that both share, and the two answers, as text."""
    start = pair.chosen.mask.index(True)
    assert pair.rejected.mask.index(True) == start
    assert pair.rejected.tokens[:start] == pair.chosen.tokens[:start]
    answers = ([t for t, own in zip(e.tokens, e.mask, strict=True) if own] for e in pair)
    return tokenizer.decode(pair.chosen.tokens[:start]), *map(tokenizer.decode, answers)


SYSTEM = {"role": "system", "content": "be"}
WHOLE = {"chosen": said("hi", "yes"), "rejected": said("hi", "no")}


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, {"prompt_template": "{question}>"},
         ("hi>", "yes<eos>", "no<eos>")),
        ({"ask": "hi", "good": "yes", "bad": 0}, {"prompt_field": "ask", "chosen_field": "good",
         "rejected_field": "bad"}, ("hi", "yes<eos>", "0<eos>")),
        ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, {"chat_template": TALK}, ("hi>", "yes<eos>", "no<eos>")),
        (WHOLE, {"chat_template": TALK}, ("hi>", "yes<eos>", "no<eos>")),
        ({"prompt": "hi", **WHOLE}, {"chat_template": TALK}, ("hi>", "yes<eos>", "no<eos>")),
        ({"prompt": "hi", "chosen": said("", "yes")[1:], "rejected": said("", "no")[1:]}, {"chat_template": TALK},
         ("hi>", "yes<eos>", "no<eos>")),
        ({"prompt": said("a", "b", "hi"), "chosen": said("", "yes")[1:], "rejected": said("", "no")[1:]},
         {"chat_template": TALK}, ("a>b<eos>hi>", "yes<eos>", "no<eos>")),
        ({"chosen": said("a", "b", "c", "d"), "rejected": said("a", "b", "c", "e")}, {"chat_template": TALK},
         ("a>b<eos>c>", "d<eos>", "e<eos>")),
        ({"chosen": said("a", "b", "c", "d"), "rejected": said("a", "e", "c", "d")}, {"chat_template": TALK},
         ("a>", "b<eos>d<eos>", "e<eos>d<eos>")),
        ({"ask": " hi\n", **WHOLE}, {"chat_template": TALK, "prompt_field": "ask"}, ("hi>", "yes<eos>", "no<eos>")),
        ({"ask": said("a", "b", "c"), "chosen": said("a", "b", "c", "d"), "rejected": said("a", "b", "c", "e")},
         {"chat_template": TALK, "prompt_field": "ask"}, ("a>b<eos>c>", "d<eos>", "e<eos>")),
        ({"ask": "hi", "chosen": [SYSTEM, *said("hi", "yes")], "rejected": [SYSTEM, *said("hi", "no")]},
         {"chat_template": TALK, "prompt_field": "ask"}, ("be<eos>hi>", "yes<eos>", "no<eos>")),
        ({"chosen": "Human: hi Assistant: yes", "rejected": "Human: hi Assistant: no"}, {},
         ("Human: hi Assistant: ", "yes<eos>", "no<eos>")),
        ({"chosen": "hello", "rejected": "hell"}, {}, ("hell", "o<eos>", "<eos>")),
    ],
)  # fmt: skip
def test_preference_row_formats_give_expected_pairs(jsonl, row, settings, expected):
    assert read(next(prefer(jsonl(row), **settings))) == expected


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
@pytest.mark.parametrize("row", [WHOLE, {"prompt": "hi", "chosen": "yes", "rejected": "no"}], ids=["whole", "texts"])
def test_chat_preference_answers_end_with_end_of_turn(jsonl, template, row):
    settings = {"tokenizer": byte_pairs(), "chat_template": template}
    pair = next(prefer(jsonl(row), **settings))
    context = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert read(pair, byte_pairs()) == (context, "yes<|im_end|>", "no<|im_end|>")
    scored = next(prefer(jsonl(row), as_scores=True, **settings))
    assert [byte_pairs().decode(episode.tokens[-1:]) for episode in scored] == ["<|im_end|>"] * 2


TEXTS = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
BARE = {"chosen": "hi yes", "rejected": "hi no"}
ALIKE = [
    ([TEXTS, {**TEXTS, "rejected": "yes"}, TEXTS], {}),
    ([TEXTS, {**TEXTS, "chosen": "é", "rejected": "è"}, TEXTS], {}),  # neither is in the vocabulary
    ([TEXTS, {**TEXTS, "rejected": "yes"}, TEXTS], {"chat_template": TALK}),
    ([TEXTS, {**TEXTS, "rejected": "yes "}, TEXTS], {"chat_template": TALK.replace("content", "content | trim")}),
    ([TEXTS, {**TEXTS, "rejected": "yes"}, TEXTS], {"too_long": "error", "max_tokens": 9}),
    ([WHOLE, {**WHOLE, "rejected": WHOLE["chosen"]}, WHOLE], {"chat_template": TALK}),
    ([WHOLE, {**WHOLE, "rejected": said("hi", "yes ")}, WHOLE],
     {"chat_template": TALK.replace("content", "content | trim")}),
    ([BARE, {**BARE, "rejected": "hi yes"}, BARE], {}),
    ([BARE, {"chosen": "hi é", "rejected": "hi è"}, BARE], {}),
]  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("rows", "settings"), ALIKE)
def test_preference_pairs_with_equal_answers_are_skipped_and_counted(jsonl, rows, settings, streaming):
    data = prefer(jsonl(*rows), streaming=streaming, shuffle=False, epochs=1, **settings)
    assert [read(pair) for pair in data] == [read(data.held_out(1)[0])] * 2
    assert (data.served, data.skipped) == (2, 1)
    with pytest.raises(ValueError, match="only 2 pairs are available that are not alike in chosen and rejected"):
        data.held_out(3)
    with pytest.raises(
        ValueError, match=r"data\.jsonl: no row is usable, because all 2 pairs are alike in chosen and rejected"
    ):
        prefer(jsonl(rows[1], rows[1]), streaming=streaming, **settings)


def test_reward_model_pairs_mask_only_last_token(jsonl):
    plain, scored = (next(prefer(jsonl(WHOLE), chat_template=TALK, as_scores=on)) for on in (False, True))
    for one, other in zip(plain, scored, strict=True):
        assert one.tokens == other.tokens
        assert other.mask == [False] * (len(one.tokens) - 1) + [True]
        assert other.tokens[-1] == TOKENIZER.eos_token_id


def test_preference_pairs_are_packed_as_units_of_two(jsonl):
    data = prefer(task="apps.toys.words:Reverse", prompt_template="{question}>")
    batch = pack([episode for pair in islice(data, 5) for episode in pair], unit=2)
    assert (len(batch), batch.unit) == (10, 2)


def test_preference_pair_with_one_too_long_answer_is_skipped(jsonl):
    rows = [{"prompt": "q", "chosen": "a" * n, "rejected": "b" * m} for n, m in ((2, 2), (5, 2), (2, 5))]
    data = prefer(jsonl(*rows), max_tokens=4, epochs=1)
    assert [read(pair) for pair in data] == [("q", "aa<eos>", "bb<eos>")]
    assert data.skipped == 2
    with pytest.raises(ValueError, match="row 2: the pair has 7 tokens, max_tokens is 4"):
        prefer(jsonl(*rows), max_tokens=4, too_long="error")


@pytest.mark.parametrize("task", TASKS)
def test_toy_preference_tasks_pair_right_answers_with_near_misses(task):
    data = prefer(task=task, difficulty=3, seed=5, prompt_template="{question}=")
    pairs = [read(pair) for pair in islice(data, 200)]
    rows = list(islice(load_task(task).rows(difficulty=3, seed=5), 200))
    assert [(context, right) for context, right, _ in pairs] == [(f"{q}=", f"{a}<eos>") for q, a in rows]
    for _, right, wrong in pairs:
        assert right != wrong
        assert abs(len(right) - len(wrong)) <= 1
    held = [read(pair)[0].removesuffix("=") for pair in data.held_out(40)]
    assert all(split_of(question) == "test" for question in held)
    assert not {*held} & {question for question, _ in rows}
    assert data.held_out(40) == data.held_out(40)


def edits(word: str) -> set[str]:
    """All words that are one slip away from a word."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    found = set()
    for i in range(len(word)):
        found |= {word[:i] + word[i + 1 :], word[: i + 1] + word[i:]} | {word[:i] + c + word[i + 1 :] for c in letters}
        found.add(word[:i] + word[i : i + 2][::-1] + word[i + 2 :])
    return found - {word}


@given(
    answer=st.text("abcxyz0019", min_size=1, max_size=8) | st.text("0123", min_size=1, max_size=4), seed=st.integers()
)
def test_generated_mistake_is_one_edit_from_right_answer(answer, seed):
    wrong = mistake(answer, Random(seed))
    assert wrong
    assert wrong in edits(answer)
    assert mistake(answer, Random(seed)) == wrong
    if answer.isdecimal():
        assert int(wrong) != int(answer)


@pytest.mark.parametrize("settings", [{}, {"streaming": True}, {"shuffle": False, "max_tokens": 5}])
def test_preference_pairs_resume_at_every_position(jsonl, settings):
    path = jsonl(*({"prompt": f"q{i}", "chosen": "yes"[: 1 + i % 3], "rejected": "no"} for i in range(9)))
    data, states, pairs = prefer(path, **settings), [], []
    for _ in range(25):
        states.append(json.dumps(data.state_dict()))
        pairs.append(next(data))
    for position, state in enumerate(states):
        resumed = prefer(path, **settings)
        resumed.load_state_dict(json.loads(state))
        assert list(islice(resumed, 25 - position)) == pairs[position:]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{**TEXTS, "rejected": "yes"}, TEXTS], {"max_tokens": 3},
         "data.jsonl: .* alike in chosen and rejected or longer than max_tokens=3"),
        ([{"chosen": "a", "rejected": "é"}, {"chosen": "aé", "rejected": "aè"}], {"too_long": "error", "max_tokens": 9},
         "row 1: chosen and rejected have no common start"),
        ([TEXTS, {"prompt": "hi", "chosen": "a"}], {}, "no field 'rejected': the row has prompt, chosen"),
        ([TEXTS, {"chosen": "b", "rejected": "a"}], {}, "row 2: no field 'question': the row has chosen, rejected"),
        ([TEXTS, {**TEXTS, "chosen": None}], {}, "row 2: field 'chosen' must be text or a number, not NoneType"),
        ([{"ask": "hi", **WHOLE}, {"ask": "ho", **WHOLE}], {"chat_template": TALK, "prompt_field": "ask"},
         "row 2: chosen does not start with the text of field 'ask': omit dataset.prompt_field"),
        ([{"ask": said("hi", "so", "a"), **WHOLE}], {"chat_template": TALK, "prompt_field": "ask"},
         "row 1: chosen does not start with the text of field 'ask'"),
        ([{"ask": "hi", **WHOLE, "rejected": said("ho", "no")}], {"chat_template": TALK, "prompt_field": "ask"},
         "row 1: rejected does not start with the text of field 'ask'"),
        ([WHOLE], {"chat_template": TALK, "prompt_field": "ask"}, "no field 'ask': the row has chosen, rejected"),
        ([TEXTS], {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
         "row 1: message 2: the chat template writes no end after an assistant turn"),
        ([{**WHOLE, "rejected": said("ho", "no")}], {"chat_template": TALK},
         "row 1: the two differ from message 1 on, where chosen must have an assistant message, but its role is user"),
        ([{**WHOLE, "rejected": said("hi")}], {"chat_template": TALK},
         "the two differ from message 2 on, where rejected must have an assistant message, but its role is none"),
        ([WHOLE, {**WHOLE, "rejected": "no"}], {"chat_template": TALK}, "row 2: field 'rejected' must be a list of"),
        ([{"chosen": said("", "a")[1:], "rejected": said("", "b")[1:]}], {"chat_template": TALK},
         "row 1: message 1 has role assistant"),
        ([WHOLE], {}, "the tokenizer has no chat template"),
        ([WHOLE], {"chat_template": TALK, "prompt_template": "{x}"}, "conversations, to which prompt_template does"),
        ([TEXTS], {"target_pattern": "(.)"}, "unknown key 'target_pattern'"),
        ([TEXTS], {"max_tokens": 3}, "all 1 pairs are longer than max_tokens=3"),
        ([TEXTS], {"too_long": "truncate"}, "too_long must be one of skip, error; got 'truncate'"),
    ],
)  # fmt: skip
def test_invalid_preference_pair_error_names_the_fault(jsonl, rows, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        prefer(jsonl(*rows), **settings)
    assert "\n" not in str(caught.value)
