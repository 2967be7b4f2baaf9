"""From rows to prompts: fields, templates, chat formats, and one helpful line for every bad input."""

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from forge.data.prompts import PromptFormat
from forge.models.tokenizer import character_tokenizer, encode_prompt
from forge.rewards.rules import MathReward
from tests.data.rows import ROWS, TOKENIZER, make

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]{{ opening or '' }}"


def test_prompt_template_fills_fields_and_formats_numbers(jsonl):
    path = jsonl({"problem": "2+2", "hint": "even", "solution": 4}, {"problem": "3", "hint": 1, "solution": 2.5})
    data = make(path, target_field="solution", prompt_template="{hint}: {question} {{x}}\n", shuffle=False)
    assert [(str(s.prompt), s.target) for s in data.held_out(2)] == [("even: 2+2 {x}\n", "4"), ("1: 3 {x}\n", "2.5")]
    assert (
        next(make(path, target_field=None, prompt_field="hint", shuffle=False))
        == (make(path, target_field=None, prompt_template="{hint}").held_out(1)[0])
    )


@pytest.mark.parametrize("form", ["$A", "<pad> $A", "$A <eos>", "<pad> $A <eos>"])
@pytest.mark.parametrize("text", ["2+2", "<pad>2+2", "2+2<eos>"])
def test_prompt_tokens_have_bos_once_and_no_added_eos(form, text):
    tokenizer = character_tokenizer()
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(form, special_tokens=[("<pad>", 0), ("<eos>", 1)])
    ids = encode_prompt(text, tokenizer)
    assert (ids.count(0), ids.count(1)) == ("<pad>" in form + text, "<eos>" in text)


def test_chat_template_setting_renders_dataset_prompts(jsonl):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    settings = {"tokenizer": tokenizer, "chat_template": True}
    sample = next(make(jsonl(ROWS[0]), system_prompt="Be brief.", prompt_template="{question}?", **settings))
    assert str(sample.prompt) == "[system]Be brief.[user]q0?[assistant]"
    assert tokenizer.decode(list(sample.prompt.token_ids)) == str(sample.prompt)
    opened = next(make(jsonl(ROWS[0]), chat_options={"opening": "<think>"}, **settings))
    assert str(opened.prompt) == "[user]q0[assistant]<think>"
    given = make(jsonl(*ROWS[:3]), chat_template=CHAT.replace("[", "<").replace("]", ">"))
    assert [str(sample.prompt) for sample in given.held_out(2)] == ["<user>q0<assistant>", "<user>q1<assistant>"]
    assert given.held_out(2) == given.held_out(2)
    assert all(TOKENIZER.decode(list(s.prompt.token_ids)) == str(s.prompt) for s in given.held_out(3))


def test_answered_dataset_prompts_end_with_eos():
    tokens, mask = PromptFormat(TOKENIZER, "{question}=").answered({"question": "1+2"}, "3")
    assert TOKENIZER.decode([t for t, own in zip(tokens, mask, strict=True) if own]) == "3<eos>"
    assert TOKENIZER.decode([t for t, own in zip(tokens, mask, strict=True) if not own]) == "1+2="
    endless = character_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        PromptFormat(endless, "{question}=").answered({"question": "1+2"}, "3")


def test_multiple_choice_prompts_list_options_and_letter_targets(jsonl):
    asks = {"prompt_template": "{question}\n{choices}\n", "shuffle": False}
    listed = [{"question": "q", "options": ["x", "y", 3], "answer": answer} for answer in ("B", 2, "x", "3")]
    data = make(jsonl(*listed), choices_field="options", **asks).held_out(4)
    assert str(data[0].prompt) == "q\nA. x\nB. y\nC. 3\n"
    assert [sample.target for sample in data] == ["B", "C", "A", "C"]

    names = ["Correct", "Wrong 1", "Wrong 2"]
    rows = [{"question": f"q{n}", **dict(zip(names, (f"r{n}", f"s{n}", f"t{n}"), strict=True))} for n in range(30)]
    path = jsonl(*rows)
    data = make(path, choices_field=names, target_field="Correct", **asks).held_out(30)
    for n, sample in enumerate(data):
        assert f"{sample.target}. r{n}\n" in str(sample.prompt)
        assert sorted(line[3:] for line in str(sample.prompt).splitlines()[1:]) == [f"r{n}", f"s{n}", f"t{n}"]
    assert {sample.target for sample in data} == {"A", "B", "C"}
    assert make(path, choices_field=names, target_field="Correct", **asks).held_out(30) == data


ROW = {"question": "one", "answer": "1"}
CHOICE = {"question": "one", "answer": "D", "options": ["x", "y"]}


CHOOSE = {"choices_field": "options", "prompt_template": "{choices}"}


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([ROW, '{"question": '], {}, r"data.jsonl, line 2: invalid JSON"),
        ([CHOICE], CHOOSE, "the target 'D' must name one of the 2 options"),
        ([{**CHOICE, "options": "x"}], CHOOSE, "must be a list of 2 to 26 options, not 'x'"),
        ([ROW], CHOOSE, "no field 'options'"),
        ([ROW], {"choices_field": "options"}, "choices_field must be set if and only if"),
        ([ROW, "", "[1]"], {}, r"data.jsonl, line 3: a row must be an object, not list"),
        ([ROW, {"question": "two", "label": 2}], {}, r"row 2: no field 'answer': the row has question, label"),
        ([{"text": "a", "answer": 1}], {}, r"row 1: no field 'question': the row has text, answer"),
        ([ROW], {"prompt_field": "prompt"}, r"row 1: no field 'prompt': the row has question, answer"),
        ([ROW, {"question": None, "answer": 1}], {}, r"row 2: field 'question' must be text or a number, not NoneType"),
        ([ROW, {"question": " ", "answer": 1}], {}, r"row 2: the prompt "),
        ([], {}, "is empty: it has no rows"),
        ([ROW], {"max_prompt_tokens": 2}, r"all 1 prompts are longer than max_prompt_tokens=2"),
        ([ROW, {"question": "three", "answer": 3}], {"max_prompt_tokens": 3, "too_long": "error"},
         r"row 2: the prompt has 5 tokens, max_prompt_tokens is 3"),
        ([ROW], {"prompt_template": "{qestion}"}, r"row 1: no field 'qestion': the row has question, answer"),
        ([ROW], {"prompt_template": r"\boxed{} {question}"}, "write {{ and }} for braces"),
        ([ROW], {"prompt_template": "{question"}, "write {{ and }} for braces"),
        ([ROW], {"prompt_template": "{question.__class__}"}, "braces hold one field name"),
        ([ROW], {"target_pattern": r"####\s*(.+)"}, r"row 1: target_pattern .* does not match .* '1'"),
        ([ROW], {"target_pattern": "####"}, "needs a group"),
        ([ROW], {"target_pattern": "("}, "not a regular expression"),
        ([ROW], {"target_pattern": "(.)", "target_field": None}, "needs a target_field"),
        ([ROW], {"chat_template": True}, "the tokenizer has no chat template"),
        ([ROW], {"system_prompt": "Hi"}, "need chat_template: true"),
        ([ROW], {"too_long": "cut"}, "too_long must be one of skip, error; got 'cut'"),
        ([ROW], {"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        ([ROW], {"epochs": 0}, "epochs must be at least 1"),
        ([ROW], {"task": "apps.toys.numbers:Add"}, "set exactly one of dataset.path .*, dataset.task and"),
    ],
)  # fmt: skip
def test_invalid_prompt_row_error_names_the_fault(jsonl, rows, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(jsonl(*rows), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not GSM8K.exists(), reason="no GSM8K in ../shared/data")
def test_gsm8k_targets_are_accepted_by_math_reward():
    data = make(str(GSM8K / "test.jsonl"), target_pattern=r"####\s*(.+)", max_prompt_tokens=300)
    for sample in data.held_out(200):
        assert len(sample.prompt.token_ids) <= 300
        assert MathReward()(str(sample.prompt), f"The answer is {sample.target}.", sample.target) == 1.0


def test_prompts_list_end_of_turn_tokens_of_chat_template(jsonl):
    ends = "{% for m in messages %}{{ m.content }}{{ '<pad>' if m.role == 'assistant' }}{% endfor %}"
    only_prompts = "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"
    pad, eos = range(2)
    for template, stop_ids in ((False, ()), (ends, (pad, eos)), (only_prompts, (eos,))):
        assert next(make(jsonl(ROWS[0]), chat_template=template)).prompt.stop_ids == stop_ids
