"""Prompts of several turns and with tools, and the forms of TRL's rows, as the policy reads them."""

import copy
from typing import Any

import pytest

from forge.data.files import Rows
from forge.data.prompts import PromptDataset
from forge.data.supervised import SupervisedDataset
from forge.types import Episode, Sample
from tests.data.templates import CHATML, byte_pairs

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 7 + 5?"},
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": "And then?"},
]
RENDERED = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK) + "<|im_start|>assistant\n"
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + CHATML


def tokenizer(template: str | None = CHATML) -> Any:
    chat = copy.copy(byte_pairs())
    chat.chat_template = template
    return chat


def first(row: dict[str, Any], template: str | None = CHATML, **settings: Any) -> Sample:
    return next(PromptDataset(Rows([row]), tokenizer=tokenizer(template), **settings))


def test_conversation_prompts_are_rendered_with_chat_template():
    sample = first({"prompt": TALK, "answer": "stop", "level": 2})
    assert sample.prompt.text == RENDERED
    assert tokenizer().decode(sample.prompt.token_ids) == RENDERED
    assert (sample.target, sample.prompt.row["level"], sample.prompt.conversational) == ("stop", 2, True)
    assert list(sample.prompt.messages) == TALK
    # The end of a turn ends the answer; a text prompt of the same run ends as it did.
    assert list(sample.prompt.stop_ids) == tokenizer().convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    assert first({"prompt": "2+2", "answer": "4"}).prompt.stop_ids == ()


def test_tools_of_dataset_row_are_rendered_into_prompt():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert (
        first({"prompt": TALK, "answer": "", "tools": tools}, TOOLS, target_field=None).prompt.text
        == "[add]" + RENDERED
    )
    assert first({"prompt": TALK, "tools": None}, TOOLS, target_field=None).prompt.text == RENDERED


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"prompt": TALK[:3]},
            {},
            "field 'prompt' ends with an assistant message: remove it",
        ),
        ({"prompt": [{"role": "me", "content": "?"}]}, {}, "prompt, message 1 has the role 'me'"),
        (
            {"prompt": TALK},
            {"prompt_template": "Q: {question}"},
            "to which dataset.prompt_template and dataset.choices_field do not apply",
        ),
        ({"prompt": TALK, "tools": "add"}, {}, "the tools of a conversation are invalid JSON"),
    ],
)
def test_invalid_prompt_conversation_raises_one_line_error(row, settings, message):
    with pytest.raises(ValueError, match=message):
        first(row, target_field=None, **settings)


def learnt(row: dict[str, Any], **settings: Any) -> tuple[str, str]:
    """The context and what is trained of the row's episode."""
    episode: Episode = next(SupervisedDataset(Rows([row]), tokenizer=tokenizer(), **settings))
    start = episode.mask.index(True)
    assert all(episode.mask[start:])
    return tokenizer().decode(episode.tokens[:start]), tokenizer().decode(episode.tokens[start:])


@pytest.mark.parametrize("completion", ["It is 12.", [{"role": "assistant", "content": "It is 12."}]])
def test_prompt_completion_rows_train_only_completion(completion):
    assert learnt({"prompt": TALK, "completion": completion}) == (RENDERED, "It is 12.<|im_end|>")
    if isinstance(completion, str):
        assert learnt({"prompt": "7 + 5 =", "completion": " 12"}) == ("7 + 5 =", " 12<eos>")
