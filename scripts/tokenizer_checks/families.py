"""Families of models with their real tokenizers, which `make test-tokenizers` fetches, and how each writes a turn."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(os.environ.get("FORGE_TOKENIZERS", Path(__file__).parents[2] / "build/tokenizers"))
MISSING = "" if (ROOT / "mistral").is_dir() else f"no tokenizers in {ROOT}: make test-tokenizers fetches them"

# Mistral's maker renders in Python, and ships no template. This writes what its code does for one question, without a
# system prompt; of several it moves the tools to the last.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if loop.first and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id or "call00000" }}"}'
    "[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """One row of the table.

    `template`: a file of TRL's package, or a text, where the tokenizer's package has none. `head` and `close`: what is
    before the words of a turn of the assistant and after them, written out by hand. `stops`: the tokens that end a
    turn. `training`: TRL's training template, which marks what is trained. `empty`: what the template writes in
    the last turn only, where there is no thought. `prompted`: its prompt begins the thought, which it then leaves out
    of every turn. `marks`: special tokens that are added to the tokenizer of another family, where no package has the
    family's own. `added`: the end of a turn that the template writes only if a message follows.
    """

    name: str
    head: str
    close: str
    stops: tuple[str, ...]
    syntax: str
    folder: str = ""
    template: str = ""
    training: str = ""
    empty: str = ""
    prompted: bool = False
    marks: tuple[str, ...] = ()
    added: str = ""

    @property
    def closers(self) -> tuple[str, ...]:
        return (self.close, *self.stops)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _tokenizer(self.folder or self.name, self.template, self.marks)

    def marked(self) -> str:
        return (ROOT / "templates" / self.training).read_text()


@cache
def _tokenizer(folder: str, template: str, marks: tuple[str, ...]) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / folder)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    if template:
        tokenizer.chat_template = template if "{" in template else (ROOT / "templates" / template).read_text()
    return tokenizer


_LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_IM = "<|im_start|>assistant\n"
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen3",
            _IM,
            "<|im_end|>",
            ("<|im_end|>",),
            "hermes",
            training="qwen3_training.jinja",
            empty="<think>\n\n</think>\n\n",
        ),
        Family(
            "qwen2_5", _IM, "<|im_end|>", ("<|im_end|>",), "hermes", "qwen3", "qwen2_5.jinja", "qwen2_5_training.jinja"
        ),
        Family(
            "llama3",
            _LLAMA,
            "<|eot_id|>",
            ("<|eot_id|>", "<|end_of_text|>"),
            "plain",
            training="llama3_training.jinja",
        ),
        Family("llama3_1", _LLAMA, "<|eot_id|>", ("<|eot_id|>",), "llama3", template="llama3_1.jinja"),
        Family(
            "gemma3",
            "<start_of_turn>model\n",
            "<end_of_turn>",
            ("<end_of_turn>",),
            "plain",
            training="gemma3_training.jinja",
        ),
        Family(
            "deepseek_v3",
            "<｜Assistant｜>",
            "<｜end▁of▁sentence｜>",
            ("<｜end▁of▁sentence｜>",),
            "deepseek",
        ),
        Family(
            "deepseek_r1",
            "<｜Assistant｜><think>\n",
            "<｜end▁of▁sentence｜>",
            ("<｜end▁of▁sentence｜>",),
            "deepseek",
            folder="deepseek_v3",
            template="deepseekv3.jinja",
            empty="</think>\n\n",
            prompted=True,
        ),
        Family(
            "gptoss",
            "<|start|>assistant",
            "<|return|>",
            ("<|return|>", "<|call|>"),
            "harmony",
            template="gptoss.jinja",
            training="gptoss_training.jinja",
            empty="<|channel|>final<|message|>",
        ),
        Family("smollm2", _IM, "<|im_end|>", ("<|im_end|>",), "plain"),
        Family(
            "qwen3_5",
            _IM + "<think>\n",
            "<|im_end|>",
            ("<|im_end|>",),
            "qwen_xml",
            "qwen3",
            "qwen3_5_think.jinja",
            "qwen3_5_think_training.jinja",
            empty="\n\n</think>\n\n",
        ),
        Family(
            "qwen3_8",
            _IM + "<think>\n",
            "<|im_end|>",
            ("<|im_end|>",),
            "qwen_xml",
            "qwen3",
            "qwen3_8.jinja",
            "qwen3_8_training.jinja",
            empty="\n\n</think>\n\n",
        ),
        Family(
            "glm4_5",
            "<|assistant|>",
            "<|user|>",
            ("<|user|>", "<|observation|>", "<|im_end|>"),
            "glm",
            "qwen3",
            "glm4moe.jinja",
            "glm4moe_training.jinja",
            empty="\n<think></think>",
            added="<|user|>",
            marks=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ),
        Family(
            "nemotron_3",
            _IM + "<think>\n",
            "<|im_end|>",
            ("<|im_end|>",),
            "qwen_xml",
            "qwen3",
            "nemotron_3_nano.jinja",
            empty="</think>\n\n",
            prompted=True,
        ),
        Family(
            "lfm2_5",
            _IM,
            "<|im_end|>",
            ("<|im_end|>",),
            "plain",
            "qwen3",
            "lfm2_2_5.jinja",
            marks=("<|startoftext|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        Family(
            "gemma4",
            "<|turn>model\n",
            "<turn|>",
            ("<turn|>", "<|tool_response>", "<end_of_turn>"),
            "gemma",
            "gemma3",
            "gemma4_v5.jinja",
            marks=(
                *("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
                *("<|tool>", "<tool|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
            ),
        ),
        Family("mistral", "[/INST]", "</s>", ("</s>",), "mistral", template=MISTRAL),
    )
}
