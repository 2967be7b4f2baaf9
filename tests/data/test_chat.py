"""Conversations as tokens and masks: what the assistant wrote, all of it and nothing else."""

import pytest
from hypothesis import example, given, strategies as st

from forge.data.chat import ChatFormat
from forge.data.messages import read_messages
from tests.data.templates import (
    CHATML,
    CHATML_MARKED,
    LLAMA3,
    LLAMA3_MARKED,
    THINKING,
    byte_pairs,
    mask_by_bytes,
    pieces,
)

END = {CHATML: "<|im_end|>", CHATML_MARKED: "<|im_end|>", LLAMA3: "<|eot|>", LLAMA3_MARKED: "<|eot|>"}

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12) | st.sampled_from(
    [" The answer is 42", "\n\nhello  ", "é€😀", "def f(x):\n    return x", "  ", "how are you"]
)


@st.composite
def conversations(draw):
    system = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    turns = draw(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
    last = [{"role": "user", "content": draw(texts)}] if draw(st.booleans()) else []
    roles = ("user", "assistant")
    return [
        *system,
        *({"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)),
        *last,
    ]


def said(*contents):
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]


def trained(tokenizer, tokens, mask):
    return tokenizer.decode([token for token, own in zip(tokens, mask, strict=True) if own])


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("template", END, ids=["chatml", "chatml marked", "llama3", "llama3 marked"])
@given(conversation=conversations())
@example(conversation=said("hi", " hello", "  ", " "))
def test_chat_loss_mask_covers_exactly_assistant_text(template, trim_offsets, conversation):
    tokenizer = byte_pairs(trim_offsets)
    tokens, mask = ChatFormat(tokenizer, template).encode(conversation)
    whole = tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=True, return_dict=True)
    assert tokens == whole["input_ids"]
    parts = pieces(template, conversation)
    assert "".join(text for text, _ in parts) == tokenizer.decode(tokens)
    assert mask == mask_by_bytes(tokenizer, tokens, parts)
    written = [m["content"] for m in conversation if m["role"] == "assistant"]
    clean = str.strip if template in (LLAMA3, LLAMA3_MARKED) else str
    # ChatML's header ends in a line break, which shares a token with spaces that follow it.
    if "<|begin|>" in template or not any(text[:1].isspace() for text in written):
        assert trained(tokenizer, tokens, mask) == "".join(clean(text) + END[template] for text in written)


@pytest.mark.parametrize("template", END, ids=["chatml", "chatml marked", "llama3", "llama3 marked"])
@given(conversation=conversations(), data=st.data())
def test_chat_train_on_last_and_since_limit_trained_turns(template, conversation, data):
    tokenizer = byte_pairs()
    encoder = ChatFormat(tokenizer, template)
    clean = str.strip if template in (LLAMA3, LLAMA3_MARKED) else str
    conversation = [{**message, "content": message["content"].lstrip()} for message in conversation]
    turns = [i for i, m in enumerate(conversation) if m["role"] == "assistant"]
    since = data.draw(st.integers(0, turns[-1]))
    written = {i: clean(conversation[i]["content"]) + END[template] for i in turns}
    assert trained(tokenizer, *encoder.encode(conversation, train_on="last")) == written[turns[-1]]
    later = "".join(text for i, text in written.items() if i >= since)
    assert trained(tokenizer, *encoder.encode(conversation, since=since)) == later


@given(conversation=conversations())
def test_template_generation_markers_give_the_loss_mask_of_transformers(conversation):
    tokenizer = byte_pairs()
    theirs = tokenizer.apply_chat_template(
        conversation, chat_template=CHATML_MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = ChatFormat(tokenizer, CHATML_MARKED).encode(conversation)
    assert (tokens, mask) == (theirs["input_ids"], [bool(own) for own in theirs["assistant_masks"]])


@given(turns=st.lists(st.sampled_from(["yes", "<think>\nhm\n</think>\n\nyes", "no "]), min_size=1, max_size=3))
def test_template_that_rewrites_earlier_turns_trains_only_last_turn(turns):
    conversation = said(*(text for turn in turns for text in ("why?", turn)))
    tokenizer = byte_pairs()
    encoder = ChatFormat(tokenizer, THINKING, thoughts="template")
    answer = turns[-1] if "</think>" in turns[-1] else "<think>\n\n</think>\n\n" + turns[-1]
    assert trained(tokenizer, *encoder.encode(conversation, train_on="last")) == answer + "<|im_end|>"
    if len(turns) > 1:
        with pytest.raises(
            ValueError, match=r"message 2: the chat template .* set dataset.train_on: last, or a dataset.chat_template"
        ):
            encoder.encode(conversation)


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (
            CHATML.replace("<|im_end|>", "{% if loop.last %}<eos>{% endif %}"),
            said("a", "b", "c", "d"),
            "message 2: the",
        ),
        (
            "{% if messages | length > 2 %}long {% endif %}" + CHATML,
            said("a", "b", "c", "d"),
            "message 2: .* the messages before it",
        ),
        (CHATML.replace("<|im_end|>\n", ""), said("a", "b"), "writes no end after an assistant turn"),
        (CHATML, said("a"), "no assistant message to train on; the roles are user"),
        (CHATML, said("a", "b")[1:], "message 1 has role assistant"),
        ("{{ raise_exception('no\nsystem') }}", said("a", "b"), "the chat template fails: no system"),
        ("{% if %}", said("a", "b"), "the chat template fails"),
    ],
)
def test_chat_template_with_ambiguous_turn_bounds_raises(template, conversation, message):
    with pytest.raises(ValueError, match=message) as caught:
        ChatFormat(byte_pairs(), template).encode(conversation)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no field 'messages': the row has text"),
        ({"messages": "hello"}, "field 'messages' must be a list of messages, got 'hello'"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": ["hello"]}, r"messages, message 1 must be a message \{role, content\}, not str"),
        ({"messages": [*said("a"), {"role": "Assistant", "content": "b"}]}, "message 2 has the role 'Assistant': use"),
        ({"messages": [{"content": "b"}]}, "message 1 has the role None"),
        ({"messages": [{"role": "user", "content": ["b"]}]}, "message 1 must have text as its content, not list"),
        ({"messages": [{"role": "user"}]}, "message 1 must have text as its content, not NoneType"),
    ],
)
def test_invalid_chat_messages_error_names_the_fault(row, message):
    with pytest.raises(ValueError, match=message):
        read_messages(row, "messages")


def test_assistant_turn_ends_at_next_role_token_in_glm_templates():
    # "<|begin|>" starts users' messages, and ends turns of the assistant; "<|eot|>" starts results of tools.
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|start_header|>{{ m.content }}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
        "{% else %}{{ '<|eot|>' if m.role == 'tool' else '<|begin|>' }}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header|>{% endif %}"
    )
    tokenizer = byte_pairs()
    chat = ChatFormat(tokenizer, template)
    assert trained(tokenizer, *chat.encode(said("a", "b", "c", "d"))) == "b<|begin|>d<|begin|>"
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"x": 1}}]}
    tokens, mask = chat.encode([*said("a"), call])
    assert trained(tokenizer, tokens, mask) == '<call>add {"x": 1}</call><|eot|>'
    assert chat.stop_ids[:2] == tuple(tokenizer.convert_tokens_to_ids(["<|begin|>", "<|eot|>"]))

    # A message of another role keeps the token that starts it.
    other = [*said("a", "b"), {"role": "tool", "content": "c"}, *said("d", "e")[1:]]
    tokens, mask = chat.encode(other)
    assert tokenizer.decode(tokens) == "<|begin|>a<|start_header|>b<|begin|><|eot|>c<|start_header|>e<|begin|>"
    assert trained(tokenizer, tokens, mask) == "b<|begin|>e<|begin|>"


def test_template_reading_only_content_parts_gets_text_as_parts():
    template = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    tokenizer = byte_pairs()
    assert ChatFormat(tokenizer, template).encode(said("a", "b")) == ChatFormat(tokenizer, CHATML).encode(
        said("a", "b")
    )


def test_template_with_markers_keeps_thoughts_of_earlier_turns():
    answer = "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip('\\n') }}<|im_end|>\n"
    template = CHATML_MARKED.replace("{{ m.content }}<|im_end|>{% endgeneration %}", answer + "{% endgeneration %}", 1)
    template = template.replace("{% endif %}{{ '\n' }}", "\n{% endif %}", 1)
    tokenizer = byte_pairs()
    turns = "<think>\nhm\n</think>\n\nyes", "<think>\nso\n</think>\n\nno"
    conversation = said("a", turns[0], "b", turns[1])
    assert trained(tokenizer, *ChatFormat(tokenizer, template).encode(conversation)) == "".join(
        turn + "<|im_end|>" for turn in turns
    )
    as_written = ChatFormat(tokenizer, template, thoughts="template").encode(conversation)
    assert trained(tokenizer, *as_written) == "yes<|im_end|>" + turns[1] + "<|im_end|>"


def test_inline_thought_moves_to_reasoning_content_of_template():
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}",
    )
    tokenizer = byte_pairs()
    conversation = said("a", "<think>hm</think>yes")
    tokens = ChatFormat(tokenizer, template).encode(conversation)
    assert trained(tokenizer, *tokens) == "<think>\nhm\n</think>\n\nyes<|im_end|>"
    named = ChatFormat(tokenizer, template).encode(said("a", "Write </think> to close it."))
    assert trained(tokenizer, *named) == "<think>\n\n</think>\n\nWrite </think> to close it.<|im_end|>"
