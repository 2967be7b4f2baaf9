"""Constrained decoding: what a grammar accepts, and the distribution that it leaves."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forge.engines import EmbeddedEngine
from forge.types import Completion, Sampling
from forge_agents.grammar import Grammars, calls_grammar, json_grammar
from forge_envs.calls import read_action
from tests.engines.conftest import logits_of, make, random_model  # noqa: F401 (a fixture)

pytest.importorskip("llguidance")

TEXTS = [
    '{"name": "search", "arguments": {"query": "the fox", "limit": 12}}',
    "<tool_call>\n</tool_call> true false null [1, 2, 3]",
]
SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, None]}},
    {"enum": ["red", "green", 3, None]},
    {"type": "integer", "minimum": -20, "maximum": 999},
    {"type": "number", "enum": [0.5, 1e10, -3]},
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2,6}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": 7}], "items": False, "minItems": 2},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 4}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/leaf"}},
        "required": ["tree"],
        "additionalProperties": False,
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "additionalProperties": False}},
    },
    {
        "type": "object",
        "properties": {"kind": {"const": "<tool_call>"}, "of": {"enum": ["ü", "漢", "\n"]}},
        "required": ["kind", "of"],
        "additionalProperties": False,
    },
    {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
]


def byte_tokenizer(added: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE; `<tool_call>` is text, or an added token that is "plain" or "special"."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)
    if added:
        special = added == "special"
        marks = [AddedToken(mark, special=special, normalized=False) for mark in ("<tool_call>", "</tool_call>")]
        tokenizer.add_tokens(marks, special_tokens=special)
    return tokenizer


def save(
    folder: Path, tokenizer: PreTrainedTokenizerFast, eos: str | None = "<eos>", seed: int = 0, spread: float = 0.3
) -> PreTrainedModel:
    """A random model over the tokenizer, with some more tokens that stand for nothing."""
    number = None if eos is None else tokenizer.convert_tokens_to_ids(eos)
    size = len(tokenizer) + 9
    model = random_model(seed=seed, eos=number, spread=spread, vocab_size=size, max_position_embeddings=1024)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def saved(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save(folder, tokenizer)


def text_of(tokenizer: PreTrainedTokenizerFast, completion: Completion) -> str:
    assert completion.finish == "stop"
    return str(tokenizer.decode(completion.token_ids[:-1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammar_constrained_text_matches_json_schema(
    temperature: float, saved: tuple[Path, PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    folder, _ = saved
    with EmbeddedEngine(folder, slots=32) as engine:
        answers: list[Future[list[Completion]]] = []
        for number, schema in enumerate(SCHEMAS):
            sampling = Sampling(
                n=3, max_tokens=400, temperature=temperature, seed=number, grammar=json_grammar(schema), top_p=0.95
            )
            answers.append(engine.submit([5, 9, number], sampling))
        for schema, answer in zip(SCHEMAS, answers, strict=True):
            for completion in answer.result(60):
                text = text_of(tokenizer, completion)
                jsonschema.validate(json.loads(text), schema)
                assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) or "\\" in text


def allowed_by(grammars: Grammars, grammar: str, ids: list[int], stops: frozenset[int], vocab: int) -> torch.Tensor:
    """For each token of a text, which ones the grammar allowed: (tokens, V)."""
    matcher = grammars.matcher(grammar, stops)
    lines = []
    for token in ids:
        bits = np.zeros(-(-vocab // 32), dtype=np.int32)
        matcher.fill(bits)
        lines.append(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab])
        matcher.accept(token)
    return torch.from_numpy(np.stack(lines)).bool()


def test_grammar_constrained_logprobs_are_renormalised(
    saved: tuple[Path, PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    folder, model = saved
    grammar = json_grammar(SCHEMAS[14])
    with EmbeddedEngine(folder, slots=4) as engine:
        sampling = Sampling(n=2, max_tokens=200, temperature=0.7, seed=1, grammar=grammar, top_logprobs=3)
        drawn = engine.submit([8, 9, 10], sampling).result(30)
        greedy = engine.submit([8, 9], Sampling(max_tokens=200, temperature=0, grammar=grammar)).result(30)
    vocab = model.config.vocab_size
    stops = frozenset([tokenizer.eos_token_id])
    for completion, temperature in [*((each, 0.7) for each in drawn), (greedy[0], 1.0)]:
        allowed = allowed_by(Grammars(folder, vocab), grammar, completion.token_ids, stops, vocab)
        logits = (logits_of(model, completion) / temperature).masked_fill(~allowed, -torch.inf)
        expected = logits.log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
        for top, line in zip(completion.top_logprobs, expected, strict=False):
            assert [*top.values()] == pytest.approx(line.sort(descending=True)[0][: len(top)].tolist(), abs=1e-4)
            assert len(top) == min(3, int(line.isfinite().sum()))
    assert greedy[0].token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [("start: foo", 'unknown name: "foo"'), ('{"grammars": 3}', "invalid"), ("no lark at all", "invalid")],
)
def test_invalid_grammar_raises_when_request_is_submitted(
    grammar: str, message: str, saved: tuple[Path, PreTrainedModel]
) -> None:
    with EmbeddedEngine(saved[0], slots=2) as engine, pytest.raises(ValueError, match=message) as error:
        engine.submit([5], Sampling(grammar=grammar))
    assert "\n" not in str(error.value)


LEVELS = {"type": "object", "properties": {"level": {"enum": [1, 2]}, "é": {"type": "boolean"}}, "required": ["level"]}
TOOLS = [
    {"type": "function", "function": {"name": "set_level", "parameters": LEVELS}},
    {"type": "function", "function": {"name": 'say "hi"'}},
]


@pytest.mark.full
@pytest.mark.parametrize("added", ["", "plain", "special"])
@pytest.mark.parametrize("syntax", ["hermes", "llama3"])
def test_tool_call_grammar_supports_any_special_tokens(syntax: Any, added: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(added)
    save(tmp_path, tokenizer, seed=2, spread=0.1)
    names = set()
    with EmbeddedEngine(tmp_path, slots=32) as engine:
        for choice, parallel in (("required", True), ("required", False), ("set_level", True)):
            grammar = calls_grammar(syntax, TOOLS, choice, parallel, tokenizer.get_added_vocab())
            sampling = Sampling(n=8, max_tokens=900, seed=0, grammar=grammar, top_k=30)
            for completion in engine.submit([5, 6], sampling).result(60):
                text = tokenizer.decode(completion.token_ids[:-1], skip_special_tokens=False)
                action = read_action(text, syntax, TOOLS)
                assert not action.errors
                assert not action.content
                assert len(action.calls) >= 1
                assert parallel or len(action.calls) == 1
                for call in action.calls:
                    assert choice in ("required", call.name)
                    jsonschema.validate(call.arguments, LEVELS if call.name == "set_level" else {"maxProperties": 0})
                    names.add((choice, call.name))
    assert names >= {("required", "set_level"), ("required", 'say "hi"'), ("set_level", "set_level")}
