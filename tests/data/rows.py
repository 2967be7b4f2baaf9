"""The rows that tests of data read, and the tokenizer they read them with."""

from forge.data.prompts import PromptDataset
from forge.models.tokenizer import character_tokenizer

ROWS = [{"question": f"q{i}", "answer": f"step\n#### {i}", "id": i} for i in range(23)]
TOKENIZER = character_tokenizer()


def make(path=None, **settings):
    return PromptDataset(path, tokenizer=settings.pop("tokenizer", TOKENIZER), **settings)


TASKS = [
    "apps.toys.words:Reverse",
    "apps.toys.words:Sort",
    "apps.toys.words:SortDigits",
    "apps.toys.numbers:Add",
    "apps.toys.numbers:Gcd",
    "apps.toys.expressions:Expression",
    "apps.toys.programs:Program",
]
