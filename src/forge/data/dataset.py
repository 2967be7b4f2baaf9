"""The dataset a run draws prompts from: any source, rendered, tokenised, resumable at every position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge.data.files import Row, Rows
from forge.data.prompts import PromptFormat
from forge.data.stream import RowStream
from forge.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptDataset(RowStream[Sample]):
    """An iterator of `Sample(prompt, target)`.

    Args:
        path, **rows: where rows come from and in which order; what is wrong with them is an error here. See
            `forge.data.stream.RowStream`.
        prompt_field: the field that `{question}` stands for; None finds question, prompt, problem or input.
        target_field: the field of the answer; None if there is none (targets are then empty).
        target_pattern: a regular expression whose group 1, searched in the answer, is the target.
        prompt_template: text with `{question}` or any field of the row in braces.
        chat_template: render the prompt as a user message with the tokenizer's chat template; or with this one, the
            text of a jinja template or a file that holds it.
        system_prompt: the system message before it.
        chat_options: further arguments of the chat template, such as enable_thinking.
        max_prompt_tokens: the longest prompt accepted, in tokens.
        too_long: "skip" leaves longer prompts out and counts them in `skipped`; "error" raises.
    """

    NOUN, LIMIT = "prompt", "max_prompt_tokens"

    def __init__(
        self,
        path: str | Rows | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompt_field: str | None = None,
        target_field: str | None = "answer",
        target_pattern: str | None = None,
        prompt_template: str = "{question}",
        chat_template: bool | str = False,
        system_prompt: str | None = None,
        chat_options: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        too_long: str = "skip",
        **rows: Any,
    ) -> None:
        self._format = PromptFormat(
            tokenizer,
            prompt_field,
            target_field,
            target_pattern,
            prompt_template,
            chat_template,
            system_prompt,
            chat_options,
        )
        super().__init__(path, limit=max_prompt_tokens, too_long=too_long, **rows)

    def validate(self, row: Row) -> None:
        self._format.render(row)

    def make(self, number: int, row: Row, index: int) -> Sample | None:
        text, target = self._format.render(row)
        text, ids = self._format.encode(text)
        return Sample(Prompt(text, ids, index), target) if self.fits(len(ids)) else None
