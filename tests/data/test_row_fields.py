"""Every field of a row through every consumer: each honours it, or refuses the row by an error that names it."""

import asyncio
import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, Qwen3Config

from forge.data.config import DatasetConfig
from forge.data.files import Rows
from forge.data.load import load_data
from forge.models.tokenizer import open_tokenizer
from forge.training.checkpoint_reader import dump_plain, load_plain
from forge_envs.dialogue import Dialogue
from forge_envs.tools import Toolbox, ToolEnvironment
from forge_verifiers import RewardModel
from forge_verifiers.judge import LMJudge
from forge_verifiers.process import ProcessRewardModel
from forge_weaver.problems import Problem, read_problems, score_table, write_problems
from forge_weaver.table import ScoreTable
from tests.data.templates import CHATML, byte_pairs

OFFER = "{% for t in tools or [] %}<tool>{{ t.function.name }}{% endfor %}{{ tone }}"
KNOWN = (
    OFFER + "{% for m in messages if m.role in ('system', 'user', 'assistant') %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER = OFFER + "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
ONLY_FIRST = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + KNOWN.replace(
    "'system', ", ""
)
SIGN = "qzsign"  # what a field says
TOOL = {"type": "function", "function": {"name": SIGN, "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}, {"role": "user", "content": "q2"}]

# Each field as (messages of the prompt or None for a text, additional columns).
FIELDS = {
    "role developer": ([{"role": "developer", "content": SIGN}, *ASKED], {}),
    "system": (ASKED, {"system": SIGN}),
    "system_prompt": (ASKED, {"system_prompt": SIGN}),
    "tools": (ASKED, {"tools": [TOOL]}),
    "chat_template_kwargs": (ASKED, {"chat_template_kwargs": {"tone": SIGN}}),
    "weight": ([ASKED[0], {**ASKED[1], "content": SIGN, "weight": 0}, ASKED[2]], {}),
    "train": ([ASKED[0], {**ASKED[1], "content": SIGN, "train": False}, ASKED[2]], {}),
    "loss_scale": ([ASKED[0], {**ASKED[1], "loss_scale": 0.5}, ASKED[2]], {}),
    "tools of MCP": (ASKED, {"tools": [{"name": SIGN, "inputSchema": {"type": "object"}}]}),
    "function_call": ([ASKED[0], {**ASKED[1], "function_call": {"name": SIGN, "arguments": "{}"}}, ASKED[2]], {}),
    "refusal": ([ASKED[0], {"role": "assistant", "refusal": SIGN, "weight": 0}, ASKED[2]], {}),
    "images": (ASKED, {"images": [SIGN]}),
    "history": (ASKED, {"history": [["q0", SIGN]]}),
    "question beside messages": ([{"role": "system", "content": SIGN}, *ASKED], {"question": "q2"}),
    "system of a text": (None, {"system": SIGN}),
    "tools of a text": (None, {"tools": [TOOL]}),
    "instruction": (None, {"instruction": SIGN, "input": "q2"}),
}
ANSWER = [{"role": "assistant", "content": "good"}]


def words():
    tokenizer = copy.deepcopy(byte_pairs())
    tokenizer.chat_template = KNOWN
    return tokenizer


def prompt_of(field, name="prompt"):
    messages, columns = FIELDS[field]
    return ({} if "input" in columns else {name: messages or "q2"}) | columns, {} if messages else {
        "chat_template": True
    }


def read_rows(kind, row, **settings):
    return next(load_data(words(), kind=kind, path=Rows([row]), shuffle=False, **settings))


def spell(tokens, mask=None):
    """The text of tokens, in which trained ones follow a mark."""
    mask = mask or [False] * len(tokens)
    return "".join(("*" if on else "") + byte_pairs().decode([token]) for token, on in zip(tokens, mask, strict=True))


def as_sft(field, folder):
    row, settings = prompt_of(field)
    episode = read_rows("supervised", row | {"answer": "good"}, **settings)
    return spell(episode.tokens, episode.mask)


def as_conversation(field, folder):
    row, settings = prompt_of(field, "messages")
    if settings:
        return as_sft(field, folder)
    episode = read_rows("supervised", row | {"messages": row["messages"] + ANSWER})
    return spell(episode.tokens, episode.mask)


def as_preference(form, **scores):
    def read(field, folder):
        row, settings = prompt_of(field)
        answers = {"chosen": "good", "rejected": "bad"}
        if form != "texts" and not settings:
            answers = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        if form == "whole" and not settings:
            prompt = row.pop("prompt")
            answers = {name: prompt + answer for name, answer in answers.items()}
        chosen = read_rows("preferences", row | answers, **settings, **scores).chosen
        return spell(chosen.tokens, chosen.mask if not scores else None)

    return read


def sample_of(field):
    row, settings = prompt_of(field)
    return read_rows("prompts", row | {"answer": "x"}, **settings)


def as_prompt(field, folder):
    return spell(sample_of(field).prompt.token_ids)


def scored_by(make, **settings):
    def read(field, folder):
        verifier = make(str(folder / make.__name__), chat_template=OTHER, **settings)
        row = verifier.row(sample_of(field).prompt.text, "good")
        asyncio.run(verifier.close())
        text = spell(row.ids)
        assert "<|im_start|>" not in text
        return text

    return read


def as_question(field, folder):
    text = LMJudge("http://localhost:1/v1", "judge").question(sample_of(field).prompt.text, "good", None)
    assert "<|im_" not in text
    return text


def as_problem(field, folder):
    """Collected, written, read, scored, saved and loaded: what a distilled model would read."""
    write_problems(folder / "problems.jsonl", [Problem(sample_of(field).prompt.text, ["good"])])
    verifier = RewardModel(str(folder / "RewardModel"), chat_template=OTHER)
    table = asyncio.run(score_table(verifier, read_problems(folder / "problems.jsonl")))
    table.save(folder / "table.npz")
    row = verifier.row(ScoreTable.load(folder / "table.npz").prompts[0], "good")
    asyncio.run(verifier.close())
    return spell(row.ids)


def as_task(field, folder):
    sample = sample_of(field)
    assert "<|im_" not in sample.prompt.task.text
    environment = ToolEnvironment(Toolbox(), lambda response: 0.0)
    step = asyncio.run(environment.reset(sample._replace(prompt=sample.prompt.task), seed=0))
    return str(step.messages)


CONSUMERS = {
    "SFT": as_sft,
    "SFT, whole": as_conversation,
    "RL and evaluation": as_prompt,
    "DPO, texts": as_preference("texts"),
    "DPO, answers": as_preference("answers"),
    "DPO, whole": as_preference("whole"),
    "reward training": as_preference("answers", as_scores=True),
    "reward model": scored_by(RewardModel),
    "process rewards": scored_by(ProcessRewardModel, marker="<|begin|>", label=0),
    "judge": as_question,
    "Weaver": as_problem,
    "environments": as_task,
}
# Of each field what every consumer does, in their order: h(onoured), e(rror), or - where it has no meaning.
TABLE = {
    "role developer": "hhhhhhhhhhhh",
    "system": "hhhhhhhhhhhh",
    "system_prompt": "hhhhhhhhhhhh",
    "tools": "hhhhhhhhhhhe",
    "chat_template_kwargs": "hhhhhhhhh-he",
    "weight": "hhhhhhhhhhhh",
    "train": "hhhhhhhhhhhh",
    "loss_scale": "eeeeeeeeeeee",
    "tools of MCP": "hhhhhhhhhhhe",
    "function_call": "eeeeeeeeeeee",
    "refusal": "hhhhhhhhhhhh",
    "images": "eeeeeeeeeeee",
    "history": "eeeeeeeeeeee",
    "question beside messages": "hhhhhhhhhhhh",
    "system of a text": "hhhhhhhhhhhh",
    "tools of a text": "hhhhhhhhhhhe",
    "instruction": "eeeeeeeeeeee",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("models"), words()
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    for verifier, kind, labels in (
        (RewardModel, AutoModelForSequenceClassification, 1),
        (ProcessRewardModel, AutoModelForTokenClassification, 2),
    ):
        config = Qwen3Config(
            vocab_size=len(tokenizer), num_key_value_heads=2, num_labels=labels, pad_token_id=0, **small
        )
        kind.from_config(config).save_pretrained(path / verifier.__name__)
        tokenizer.save_pretrained(path / verifier.__name__)
    return path


def test_row_field_reaches_each_consumer_or_raises_with_field_name(folder):
    table = {}
    for field in FIELDS:
        for consumer, read in CONSUMERS.items():
            if (field, consumer) == ("chat_template_kwargs", "judge"):  # a judge has no template
                table[field, consumer] = "-"
                continue
            try:
                text, refusal = read(field, folder), ""
            except ValueError as error:
                text, refusal = "", str(error)
            # What were trained of it would have marks in between.
            assert SIGN in text or field.split()[0] in refusal, (field, consumer, text, refusal)
            table[field, consumer] = "error" if refusal else "honoured"
    rows = ["".join(table[field, consumer][0] for consumer in CONSUMERS) for field in FIELDS]
    assert dict(zip(FIELDS, rows, strict=True)) == TABLE


RESULT = [ASKED[0], {"role": "tool", "content": "r"}]


@pytest.mark.parametrize(
    ("messages", "template", "said"),
    [
        ([{"role": "system", "content": "s"}, ASKED[0]], KNOWN.replace("'system', ", ""), "message 1: .* role system"),
        (RESULT, KNOWN, "message 2: .* role tool"),
        ([*ASKED[:2], {"role": "developer", "content": "s"}, ASKED[2]], ONLY_FIRST, "message 3: .* role system"),
    ],
)
def test_message_omitted_by_chat_template_raises(messages, template, said):
    for row, kind in (({"prompt": messages}, "prompts"), ({"messages": [*messages, *ANSWER]}, "supervised")):
        settings = {"target_field": None} if kind == "prompts" else {}
        with pytest.raises(ValueError, match=f"row 1: {said}"):
            read_rows(kind, row, chat_template=template, **settings)


@pytest.mark.parametrize("call", [{"function": {"name": "add", "arguments": {}}}, {"name": "add", "arguments": "{}"}])
def test_tool_result_message_has_name_of_called_tool(call):
    template = CHATML.replace("{{ m.content }}", "{{ m.content or m.tool_calls | tojson }}{{ m.name }}")
    talk = [
        ASKED[0],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    texts = [
        spell(read_rows("supervised", {"messages": [*talk, *ANSWER]}, chat_template=template).tokens),
        spell(read_rows("prompts", {"prompt": talk}, chat_template=template, target_field=None).prompt.token_ids),
    ]
    assert all("<|im_start|>tool\nradd<|im_end|>" in text for text in texts)


def test_chat_template_without_tool_support_warns_once(caplog):
    template = CHATML + "{# without tools #}"
    for _ in range(2):
        read_rows("supervised", {"messages": [ASKED[0], *ANSWER], "tools": [TOOL]}, chat_template=template)
        Dialogue(words(), template).initial(ASKED[:1], [TOOL])
    assert [record.message for record in caplog.records if "episode.template" in record.message] == [
        "the chat template does not render tools, so the model does not see them: set episode.template (for rows "
        "dataset.chat_template) to one that does, such as chatml"
    ]


def test_preference_prompt_messages_with_text_answers_stay_chat():
    row = {"prompt": [{"role": "system", "content": "s"}, *ASKED], "chosen": "good", "rejected": "bad"}
    pair = read_rows("preferences", row)
    asked = words().apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    for episode, answer in ((pair.chosen, "good"), (pair.rejected, "bad")):
        start = episode.mask.index(True)
        assert words().decode(episode.tokens[:start]) == asked
        assert words().decode(episode.tokens[start:]) == f"{answer}<|im_end|>"


def test_prompt_keeps_dataset_row_when_saved_and_copied(tmp_path):
    sample = sample_of("tools")
    (tmp_path / "extra.pt").write_bytes(dump_plain({"samples": [sample]}, "extra.pt"))
    (loaded,) = load_plain(tmp_path / "extra.pt")["samples"]
    for prompt in (loaded.prompt, copy.deepcopy(sample.prompt)):
        assert (prompt, prompt.text.row) == (sample.prompt, sample.prompt.text.row)
    assert type(str(sample.prompt)) is type(sample.prompt.bare.text) is str


@pytest.mark.parametrize("kind", ["prompts", "supervised", "preferences"])
def test_row_with_token_beyond_model_vocabulary_raises_with_row_number(folder, kind):
    tokenizer = open_tokenizer(str(folder / "RewardModel"))
    tokenizer.add_tokens(["<new>"])
    rows = [{"question": text, "answer": "a", "chosen": "a", "rejected": "b"} for text in ("old", "a <new> one")]
    with pytest.raises(ValueError, match="row 2: the text has the token '<new>' with id 368, beyond"):
        load_data(tokenizer, kind=kind, path=Rows(rows))
    load_data(tokenizer, kind=kind, path=Rows(rows[:1]))


def test_exported_chat_template_has_chat_options_as_defaults():
    section = DatasetConfig(path="x", chat_template=KNOWN, chat_options={"tone": "calm"})
    exported = section.exported_template(words())
    assert words().apply_chat_template(ASKED, chat_template=exported, tokenize=False).startswith("calm<|im_start|>")
    assert DatasetConfig(path="x", chat_template=True).exported_template(words()) is None
    sources = [{"path": "x", "chat_template": KNOWN}, {"path": "y", "chat_template": OTHER}]
    assert DatasetConfig(sources=sources).exported_template(words()) is None
