"""Reward models: in batches what they say one by one, and what they said in training."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from forge.data.packing import pack
from forge.data.preferences import PreferenceDataset
from forge.models.tokenizer import character_tokenizer
from forge.training import checkpoint
from forge_verifiers import RewardModel
from tests.data.templates import CHATML
from tests.training.cases import TOKENIZER, make_trainer, write_classifier

PROMPT = "what is it"
RESPONSES = ["", "a", "abc", "the cat sat on the mat", "zz", "abc", *("x" * n for n in range(5, 40, 7))]


def scored(verifier, prompt=PROMPT, responses=RESPONSES):
    async def run():
        found = await verifier.score(prompt, responses)
        await verifier.close()
        return found

    return asyncio.run(run())


def closing_tokenizer():
    """Closes texts and pairs as BERT's do, and tells the two texts of a pair apart."""
    words = character_tokenizer()
    words.add_special_tokens({"cls_token": "<cls>", "sep_token": "<sep>"})
    backend = words.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("<cls>", "<sep>")],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", cls_token="<cls>", sep_token="<sep>", model_input_names=names
    )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models") / "encoder", closing_tokenizer()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=96,
        id2label={0: "bad", 1: "fair", 2: "good"},
        label2id={"bad": 0, "fair": 1, "good": 2},
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    """As `apps.reward_model` leaves it: written by the trainer."""
    folder = tmp_path_factory.mktemp("trained")
    start = write_classifier(folder / "start")
    checkpoint.export_model(make_trainer(start, head="reward"), folder / "model", start)
    return folder / "model"


def test_reward_model_verifier_scores_match_scalar_head_of_trainer(reward_model, tmp_path):
    rows = [
        {"question": "what", "chosen": "this", "rejected": "that thing"},
        {"question": "a longer question", "chosen": "x", "rejected": "zyx"},
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    pairs = PreferenceDataset(
        str(tmp_path / "pairs.json"),
        tokenizer=AutoTokenizer.from_pretrained(reward_model),
        prompt_template="{question}q",
        as_scores=True,
        shuffle=False,
    )
    episodes = [answer for _, pair in zip(rows, pairs, strict=False) for answer in pair]
    batch = pack(episodes)
    expected = make_trainer(reward_model, head="reward").predict(batch)[batch.mask]
    ours = []
    for row in rows:
        verifier = RewardModel(reward_model, prompt_template="{question}q")
        ours += scored(verifier, row["question"], [row["chosen"], row["rejected"]]).values[:, 0].tolist()
    assert verifier.row(row["question"], row["rejected"]).ids == episodes[-1].tokens
    assert episodes[-1].tokens[-1] == TOKENIZER.eos_token_id
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pad", [None, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id])
def test_batched_reward_model_scores_match_transformers(reward_model, pad, dtype, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    model.config.pad_token_id = pad
    model.save_pretrained(tmp_path)
    words = AutoTokenizer.from_pretrained(reward_model)
    words.pad_token = None
    words.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    plain.config.pad_token_id = None  # only, transformers then reads the last token
    verifier = RewardModel(tmp_path, dtype=dtype, batch_tokens=100)
    found = scored(verifier)
    expected = [plain(torch.tensor([verifier.row(PROMPT, r).ids])).logits.item() for r in RESPONSES]
    np.testing.assert_allclose(found.values[:, 0], expected, atol=1e-5 if dtype == "float32" else 0.3)
    assert not found.reasons


@pytest.mark.parametrize("as_pair", [True, False])
def test_encoder_reward_model_reads_pairs_or_joined_text(encoder, as_pair):
    plain = BertForSequenceClassification.from_pretrained(encoder).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    verifier = RewardModel(encoder, label="good", as_pair=as_pair, batch_tokens=300)
    found = scored(verifier)
    for response, value in zip(RESPONSES, found.values[:, 0], strict=True):
        texts = ([PROMPT], [response]) if as_pair else ([PROMPT + response],)
        encoded = tokenizer(*texts, return_tensors="pt")
        assert encoded["token_type_ids"].any().item() == as_pair
        logits = plain(**encoded).logits[0]
        expected = logits[2] - logits[:2].logsumexp(0)
        assert value == pytest.approx(expected.item(), abs=1e-5)


def test_reward_model_chat_text_ends_with_end_of_turn(reward_model, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    words = character_tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = CHATML
    model.resize_token_embeddings(len(words))
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    text = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    settings = {"chat_template": True, "system_prompt": "be"}
    ours, published = RewardModel(tmp_path, **settings), RewardModel(tmp_path, append_eos=False, **settings)
    assert words.decode(ours.row("hi", "yo").ids) == text.removesuffix("\n")
    assert words.decode(published.row("hi", "yo").ids) == text
    assert np.isfinite(scored(ours, "hi", ["yo", ""]).values).all()


def test_response_longer_than_reward_model_length_is_unscored(reward_model):
    found = scored(RewardModel(reward_model), responses=["ab", "y" * 100])
    assert np.isfinite(found.values[0, 0])
    assert found.reasons == {(1, 0): "it has 111 tokens, and the model reads 64"}


def test_special_tokens_in_response_are_plain_text_to_reward_model(reward_model):
    verifier = RewardModel(reward_model)
    tokenizer = verifier.model.tokenizer
    tokens = verifier.row("ab", f"zzz{tokenizer.eos_token}cba{tokenizer.pad_token}").ids
    assert (tokens.count(tokenizer.eos_token_id), tokens[-1]) == (1, tokenizer.eos_token_id)
    assert tokenizer.pad_token_id not in tokens
    assert (
        tokenizer.eos_token_id
        not in RewardModel(reward_model, append_eos=False).row("ab", f"zzz{tokenizer.eos_token}cba").ids
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "best"}, "label must be a class of the model .'bad', 'fair', 'good'., got 'best'"),
        ({}, "set label to one of 'bad'"),
        ({"label": 0, "dtype": "int8"}, "dtype must be one of"),
        ({"label": 0, "scale": "odds"}, "scale must be"),
        ({"label": 0, "as_pair": True, "append_eos": True}, "omit chat_template and append_eos"),
        ({"label": 0, "prompt_template": "{other}"}, "no field 'other'"),
        ({"label": 0, "chat_template": True}, "no chat template"),
    ],
)
def test_invalid_reward_model_settings_raise(encoder, settings, message):
    with pytest.raises(ValueError, match=message):
        RewardModel(encoder, **settings)


def test_reward_model_never_runs_code_of_model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """transformers would ask on the terminal, and whoever answers yes runs it."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Words", None]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": config["auto_map"]}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match=r"trust_remote_code|Unrecognized"):
        RewardModel(tmp_path)
    assert not (tmp_path / "ran").exists()
