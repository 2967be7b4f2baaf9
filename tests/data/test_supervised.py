"""SupervisedDataset: three forms of rows, what of each is learnt, weights, limits, order."""

import json
from itertools import islice

import pytest

from forge.data.chat import ChatFormat
from forge.data.supervised import SupervisedDataset
from tests.data.rows import ROWS, TOKENIZER, make
from tests.data.templates import CHATML, CHATML_MARKED, LLAMA3, LLAMA3_MARKED, THINKING, byte_pairs

pytestmark = pytest.mark.usefixtures("offline")
TALK = "{% for m in messages %}{{ m.content }}{{ '>' if m.role == 'user' else eos_token }}{% endfor %}"
CHATS = [
    {"messages": [{"role": "user", "content": f"u{i}"}, {"role": "assistant", "content": f"a{i}"}] * 2, "share": i / 2}
    for i in range(11)
]


def learn(path=None, **settings):
    return SupervisedDataset(path, tokenizer=settings.pop("tokenizer", TOKENIZER), **settings)


def read(episode, tokenizer=TOKENIZER):
    """(what precedes the first learnt token, what is learnt), as text."""
    start = episode.mask.index(True)
    learnt = [token for token, own in zip(episode.tokens, episode.mask, strict=True) if own]
    return tokenizer.decode(episode.tokens[:start]), tokenizer.decode(learnt)


def test_supervised_prompts_equal_prompt_dataset_prompts(places):
    settings = {"target_pattern": r"####\s*(.+)", "prompt_template": "{question}: ", "seed": 3}
    episodes, samples = learn(places["rows.jsonl"], **settings), make(places["rows.jsonl"], **settings)
    for episode, sample in islice(zip(episodes, samples, strict=True), 50):
        assert episode.tokens[: len(sample.prompt.token_ids)] == list(sample.prompt.token_ids)
        assert (episode.advantage, episode.weight, episode.logprobs) == (1.0, 1.0, None)
        assert read(episode) == (str(sample.prompt), sample.target + "<eos>")


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA3, LLAMA3_MARKED, THINKING])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_prompt_answer_row_is_encoded_like_two_message_conversation(jsonl, template, system):
    tokenizer, settings = byte_pairs(), {"tokenizer": byte_pairs(), "chat_template": template}
    talk = [{"role": "user", "content": "how are you?"}, {"role": "assistant", "content": "I am well"}]
    talk = [{"role": "system", "content": system}, *talk] if system else talk
    row = {"question": "how are you", "answer": "I am well"}
    prompts = {"prompt_template": "{question}?", "system_prompt": system, **settings}
    one, other = next(learn(jsonl(row), **prompts)), next(learn(jsonl({"messages": talk}), **settings))
    assert one == other
    assert read(one, tokenizer)[1].endswith("I am well" + ("<|eot|>" if "<|eot|>" in template else "<|im_end|>"))
    # What the policy is given when it answers in RL.
    assert tuple(one.tokens[: one.mask.index(True)]) == next(make(jsonl(row), **prompts)).prompt.token_ids


def test_supervised_conversations_train_only_assistant_turns(jsonl):
    path = jsonl(*CHATS)
    for train_on, first in (("assistant", ("u3>", "a3<eos>a3<eos>")), ("last", ("u3>a3<eos>u3>", "a3<eos>"))):
        data = learn(path, chat_template=TALK, train_on=train_on, shuffle=False)
        assert read(data.held_out(4)[3]) == first
    other = jsonl({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]})
    assert read(next(learn(other, chat_template=TALK))) == ("x>", "y<eos>")
    named = jsonl({"prompt": "p", "talk": CHATS[1]["messages"]})
    assert read(next(learn(named, chat_template=TALK, messages_field="talk"))) == ("u1>", "a1<eos>a1<eos>")


def test_supervised_conversation_is_cut_after_last_trained_token(jsonl):
    conversation = [*CHATS[0]["messages"], {"role": "user", "content": "bye"}]
    whole, _ = ChatFormat(byte_pairs(), CHATML).encode(conversation)
    episode = next(learn(jsonl({"messages": conversation}), tokenizer=byte_pairs(), chat_template=CHATML))
    assert episode.mask[-1]
    assert byte_pairs().decode(episode.tokens).endswith("assistant\na0<|im_end|>")
    assert whole[: len(episode.tokens)] == episode.tokens


@pytest.mark.parametrize("form", ["rows.jsonl", "rows.parquet", "saved", "folder"])
def test_supervised_plain_text_rows_train_all_but_first_token(places, form):
    data = learn(places[form], text_field="answer", epochs=1)
    assert sorted(read(episode) for episode in data) == sorted(("s", f"tep\n#### {i}<eos>") for i in range(23))


def test_too_long_supervised_rows_are_skipped_or_cut(jsonl):
    rows = [{"question": "q" * n, "answer": "abc"} for n in (2, 3, 4, 9)]
    skipping = learn(jsonl(*rows), max_tokens=7, shuffle=False, epochs=1)
    assert [read(e) for e in skipping] == [("qq", "abc<eos>"), ("qqq", "abc<eos>")]
    assert (skipping.skipped, skipping.served) == (2, 2)
    cutting = learn(jsonl(*rows), max_tokens=6, too_long="truncate", shuffle=False, epochs=1)
    assert [read(e) for e in cutting] == [("qq", "abc<eos>"), ("qqq", "abc"), ("qqqq", "ab")]
    assert cutting.skipped == 1
    with pytest.raises(ValueError, match="row 3: the row has 8 tokens, max_tokens is 7"):
        learn(jsonl(*rows), max_tokens=7, too_long="error")


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": TALK, "seed": 4},
        {"chat_template": TALK, "streaming": True},
        {"chat_template": TALK, "max_tokens": 12},
        {"text_field": "share"},
    ],
)
def test_supervised_rows_resume_at_every_position(jsonl, settings):
    path = jsonl(*CHATS)
    data, states, episodes = learn(path, **settings), [], []
    for _ in range(30):
        states.append(json.dumps(data.state_dict()))
        episodes.append(next(data))
    for position, state in enumerate(states):
        resumed = learn(path, **settings)
        resumed.load_state_dict(json.loads(state))
        assert list(islice(resumed, 30 - position)) == episodes[position:]
    assert data.held_out(3) == learn(path, **settings).held_out(3)


CHAT = CHATS[0]
USER = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([CHAT, USER], {}, "data.jsonl, row 2: no assistant message to train on; the roles are user"),
        ([CHAT, {"messages": [{"role": "bot", "content": ""}]}], {}, "row 2: messages, message 1 has the role 'bot'"),
        ([CHAT, {"text": "a"}], {}, "row 2: no field 'messages': the row has text"),
        ([CHAT], {"chat_template": False}, "the tokenizer has no chat template: .* set chat_template to a jinja"),
        ([CHAT], {"system_prompt": "Hi", "prompt_template": "{x}"},
         "rows are conversations, to which prompt_template, system_prompt does not apply"),
        ([CHAT], {"chat_template": TALK + "{{ messages | length }}"}, "message 2: .* set dataset.train_on: last"),
        ([ROWS[0]], {"chat_template": False, "train_on": "last"}, "prompts with answers, to which train_on does not"),
        ([ROWS[0]], {"chat_template": False, "target_field": None}, "target_field must name the field with the answer"),
        ([ROWS[0], {"question": "a"}], {"chat_template": False}, "row 2: no field 'answer': the row has question"),
        ([{"text": "a"}, {"text": ""}], {"chat_template": False, "text_field": "text", "too_long": "error",
         "max_tokens": 9}, "row 2: the text is empty"),
        ([{"text": "a"}, {"txt": "a"}], {"chat_template": False, "text_field": "text"}, "row 2: no field 'text'"),
        ([{"text": "a"}], {"text_field": "text"}, "plain text, to which chat_template does not apply"),
        ([{"text": "a"}], {"text_field": "text", "messages_field": "m"}, "exclude each other"),
        ([ROWS[0]], {"chat_template": "{% for m in messages %}{{ m.content }}>{% endfor %}"
         "{% if add_generation_prompt %}:{% endif %}"}, "message 2: the chat template renders the messages before it"),
        ([ROWS[0]], {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
         "row 1: message 2: the chat template writes no end after an assistant turn"),
        ([CHAT], {"max_tokens": 3}, "all 1 rows are longer than max_tokens=3"),
        ([CHAT], {"max_tokens": 3, "too_long": "truncate"}, "all 1 rows are longer than max_tokens=3"),
        ([CHAT], {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ([CHAT], {"too_long": "truncate"}, "truncate needs dataset.max_tokens"),
        ([CHAT], {"too_long": "cut"}, "too_long must be one of skip, truncate, error; got 'cut'"),
        ([CHAT], {"train_on": "first"}, "train_on must be one of assistant, last; got 'first'"),
    ],
)  # fmt: skip
def test_invalid_supervised_row_error_names_the_fault(jsonl, rows, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        learn(jsonl(*rows), **{"chat_template": TALK, **settings})
    assert "\n" not in str(caught.value)
