"""A tokenizer trained here, small models, and policies for episodes."""

import asyncio
from types import SimpleNamespace

import pytest

from forge.types import Completion, Sampling

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog says: who jumps over me?",
    'user\nassistant\nsystem\n<tool_call>\n{"name": "search", "arguments": {"query": "the fox"}}\n</tool_call>',
    "What is 12 + 34? It is 46. def f(x): return x + 1  # a comment\n\n\n  indented   text\twith tabs",
    "Ünïcödé, 漢字 and emoji 🙂 are bytes as well; hello world, hello there, hello again.",
]


@pytest.fixture(scope="session")
def bpe():
    """A byte-level BPE tokenizer with the special tokens of ChatML and Llama 3, and no template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"]
    special += ["<|start_header_id|>", "<|end_header_id|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        bos_token="<|begin_of_text|>",
        additional_special_tokens=special[1:],
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def small_model(bpe, tmp_path_factory):
    """The folder of a model with random weights over that tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(bpe),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=bpe.eos_token_id,
        bos_token_id=None,
        pad_token_id=bpe.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    bpe.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def engine_policy(small_model):
    """The embedded engine, asked as a service would be."""
    from forge.engines import load_engine

    engine = load_engine("embedded", small_model, slots=64)

    async def route(token_ids, **sampling):
        return (await asyncio.wrap_future(engine.submit(token_ids, Sampling(**sampling))))[0]

    yield SimpleNamespace(generate=SimpleNamespace(route=route))
    engine.close()


class Scripted:
    """A policy that says what it is told to: texts, each ended by the first stop token, or cut off where it is a pair
    (text, "length"). It keeps what it was asked."""

    def __init__(self, tokenizer, *says, version=3):
        self.tokenizer, self.says, self.version, self.asked = tokenizer, list(says), version, []
        self.generate = SimpleNamespace(route=self._route)

    async def _route(self, token_ids, *, max_tokens, stop_token_ids, seed, **sampling):
        self.asked.append({"tokens": token_ids, "max_tokens": max_tokens, "seed": seed, **sampling})
        said = self.says.pop(0)
        text, finish = said if isinstance(said, tuple) else (said, "stop")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, stop_token_ids[0]] if finish == "stop" else ids[:max_tokens]
        return Completion("", ids, [-0.5] * len(ids), {}, tuple(token_ids), [self.version] * len(ids), finish)


@pytest.fixture
def scripted(bpe):
    return lambda *says, **more: Scripted(bpe, *says, **more)
