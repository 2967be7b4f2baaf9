"""Chat templates like those of known models, what each should train, and a small tokenizer to read them with."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "What is the answer to this question? The answer is 42, because all the others are wrong.",
    "user assistant system\nhello hello there  how are you\n\nI am well,   thank you. def f(x):\n    return x + 1\n",
    "<think>\nthe question is easy\n</think>\n\nThe answer is easy: 7 + 5 = 12",
] * 3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}<|start_header|>{{ m.role }}<|end_header|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
)
LLAMA3_MARKED = LLAMA3.replace(
    "{{ m.content | trim }}<|eot|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|eot|>{% endif %}",
)
# As Qwen3: thoughts of all but the last turn are left out, and the last has them even if they are empty.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% elif m.role == 'assistant' and '</think>' not in m.content %}<think>\n\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pieces(template: str, conversation: list[dict[str, str]]) -> list[tuple[str, bool]]:
    """The text of a conversation in ChatML or Llama 3's form, written out by hand: (text, is it the assistant's)."""
    found: list[tuple[str, bool]] = []
    if template in (LLAMA3, LLAMA3_MARKED):
        found.append(("<|begin|>", False))
        for message in conversation:
            found += [
                (f"<|start_header|>{message['role']}<|end_header|>\n\n", False),
                (message["content"].strip() + "<|eot|>", message["role"] == "assistant"),
            ]
        return found
    for message in conversation:
        found += [
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"] + "<|im_end|>", message["role"] == "assistant"),
            ("\n", False),
        ]
    return found


def mask_by_bytes(tokenizer: PreTrainedTokenizerFast, tokens: list[int], parts: list[tuple[str, bool]]) -> list[bool]:
    """True on tokens that hold a byte of the assistant's, by the bytes that each token stands for."""
    owners = [own for text, own in parts for _ in text.encode()]
    mask, at = [], 0
    for token in tokenizer.convert_ids_to_tokens(tokens):
        # A special token is its own text; each character of another stands for one byte.
        size = len(token.encode()) if token in tokenizer.all_special_tokens else len(token)
        mask.append(any(owners[at : at + size]))
        at += size
    assert at == len(owners)
    return mask


@cache
def byte_pairs(trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained here. `trim_offsets` leaves spaces out of a token's characters, as Llama 3's does."""
    special = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>", "<eos>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=special)
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        additional_special_tokens=special[:-1],
        clean_up_tokenization_spaces=False,
    )
