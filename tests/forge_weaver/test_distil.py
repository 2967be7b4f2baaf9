"""A small model learns what an ensemble says, from texts only, and is the same verifier when it is opened again."""

import asyncio
import json

import numpy as np
import pytest

from forge.models.tokenizer import character_tokenizer
from forge_weaver import Distilled, ScoreTable
from forge_weaver.distil import distil

pytestmark = pytest.mark.costly

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A random BERT of two layers: nothing in it knows the task."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = character_tokenizer(LETTERS + ">")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def taught():
    """Words, and whether "a" is in them; the ensemble is sure of it to .9, and has nothing to say of some."""
    rng = np.random.default_rng(0)
    words = [["".join(rng.choice(list(LETTERS), 5)) for _ in range(4)] for _ in range(240)]
    labels = np.array([[float("a" in word) for word in row] for row in words])
    prompts = [f"{LETTERS[i % 8]}{LETTERS[i // 8 % 8]}{LETTERS[i // 64]}>" for i in range(240)]
    table = ScoreTable(labels[:, :, None], ("v",), labels=labels, prompts=prompts, responses=words)
    p = 0.1 + 0.8 * labels
    p[:, 3][rng.random(240) < 0.3] = np.nan
    return table, p


@pytest.fixture(scope="module")
def made(encoder, taught, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled") / "x"
    lines = []
    found = distil(*taught, encoder, folder, epochs=8, batch_size=32, learning_rate=3e-3, say=lines.append)
    return folder, found, lines


@pytest.mark.full
def test_distilled_verifier_agrees_with_ensemble_on_new_problems(made):
    _, found, lines = made
    assert found.agreement > 0.9
    assert found.error < 0.15
    assert found.gap < 0.1
    assert found.truth["distilled"]["auc"] > 0.9
    assert found.truth["ensemble"]["auc"] == 1.0
    assert found.trained == pytest.approx(0.8 * 240 * 3.7, rel=0.03)
    assert 70 <= found.tested <= 96
    assert len(lines) == 8
    assert found.ranking > 0.9 > found.chance > 0.5
    assert "warning" not in str(found)


def test_reopened_distilled_verifier_separates_right_from_wrong(made, taught):
    folder, _found, _ = made
    verifier = Distilled(str(folder)).setup()

    async def score(words):
        return (await verifier.score("h>", words)).values[:, 0]

    words = ["bcdea", "bcdef", "aaaaa", "hhhhh"]
    said = asyncio.run(score(words))
    assert (said[[0, 2]] > 0.6).all()
    assert (said[[1, 3]] < 0.4).all()
    assert (said > 0).all()
    assert (said < 1).all()
    assert verifier.names == ("x",)
    asyncio.run(verifier.close())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, p: (ScoreTable(t.scores, t.verifiers), p), "needs a score table with prompts and responses"),
        (lambda t, p: (t, p[:5]), "probabilities have shape"),
        (lambda t, p: (t, p[:, :0] * 0), "probabilities have shape"),
    ],
)
def test_invalid_weaver_distillation_settings_raise(encoder, taught, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        distil(*change(*taught), encoder, tmp_path / "d")


def test_distillation_does_not_overwrite_non_empty_directory(encoder, taught):
    before = (encoder / "config.json").read_text()
    with pytest.raises(ValueError, match="is not empty"):
        distil(*taught, encoder, encoder)
    assert (encoder / "config.json").read_text() == before


def test_distilled_decoder_without_pad_token_loads_in_transformers(taught, tmp_path):
    """Rows end with eos, which the model cannot pad with as well."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2Model

    tokenizer = character_tokenizer(LETTERS + ">")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=32)
    GPT2Model(config).save_pretrained(tmp_path / "gpt")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "gpt")
    table, p = taught
    distil(table.take(range(20)), p[:20], tmp_path / "gpt", tmp_path / "out", epochs=1)

    verifier = Distilled(str(tmp_path / "out")).setup()
    calibration = json.loads((tmp_path / "out/distilled.json").read_text())["reading"]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = words([f"h>{word}{words.eos_token}" for word in ("abcde", "ab", "h")], padding=True, return_tensors="pt")
    x = plain(**rows).logits[:, 0] * calibration["slope"] + calibration["intercept"]
    said = asyncio.run(verifier.score("h>", ["abcde", "ab", "h"])).values[:, 0]
    assert said == pytest.approx(x.sigmoid().tolist(), abs=1e-5)
