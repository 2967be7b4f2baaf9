"""Chat templates for tokenizers without one, or whose own rewrites earlier messages. These keep every message as it is
when later ones follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOLS = (
    "# Tools\n\nYou may call one or more of these functions, each given by its JSON schema:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
)

# Messages line by line, without roles: for base models. An answer ends with eos.
PLAIN = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
)

# ChatML as Qwen and Hermes models read it, tool calls and results between tags. A tool's result is a user turn.
CHATML = (
    "{% set system = messages[0].role == 'system' %}"
    "{% if tools or system %}<|im_start|>system\n"
    "{% if system %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{% if system %}{{ '\n\n' }}{% endif %}" + _TOOLS + "\n"
    "For each call write a JSON object with its name and arguments between tags:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>{% endif %}<|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if not (loop.first and system) %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Llama 3: a header for every message, results of tools under the role that the models know.
LLAMA3 = (
    "{{ bos_token }}"
    "{% set system = messages[0].role == 'system' %}"
    "{% if tools or system %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if system %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{% if system %}{{ '\n\n' }}{% endif %}" + _TOOLS + "\n"
    'To call a function answer with nothing but {"name": <name>, "parameters": <arguments>}.{% endif %}'
    "<|eot_id|>{% endif %}"
    "{% for message in messages %}{% if not (loop.first and system) %}"
    "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

TEMPLATES = {"plain": PLAIN, "chatml": CHATML, "llama3": LLAMA3}


def built_in(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The template of this name, beginning with the token that the tokenizer puts before every text: a base model has
    read none without it."""
    # Encoding adds bos to a text, but not to a rendered template.
    template = TEMPLATES[name]
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return "{{ bos_token }}" + template if begins and "bos_token" not in template else template
