"""The rows that tests of data read, and the tokenizer they read them with."""

from __future__ import annotations

from forge.data.dataset import PromptDataset
from forge.data.tokenizer import character_tokenizer

ROWS = [{"question": f"q{i}", "answer": f"step\n#### {i}", "id": i} for i in range(23)]
TOKENIZER = character_tokenizer()


def make(path=None, **settings):
    return PromptDataset(path, tokenizer=settings.pop("tokenizer", TOKENIZER), **settings)
