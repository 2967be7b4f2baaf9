"""Reward models and cross-encoders: any Hugging Face sequence classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from ..data.supervised import closed
from .models import BatchedModel, Padded, Row, class_of, prompt_format, row_or_error, whole
from .spec import TRUNCATE, RewardModelSettings
from .threads import Batcher
from .verifier import Scores

NOT_EXCLUSIVE = ("multi_label_classification", "regression")  # heads whose numbers stand for themselves


class RewardModel:
    """One number for each response, by a sequence classifier of one class or for one of several.

    Calls that arrive while a batch is computed are joined in the next one; it works in a thread of its own. A response
    that is too long has no score, unless it is to be cut. It has no time limit of its own: a `Panel` asks that some
    response is read in every `timeout` seconds, so that a forward pass must not take as long.

    How prompt and response become one text:

    - as this library trains reward models (default): `prompt_template` with the prompt, the response, and eos, or the
      conversation of both up to the end of the answer's turn. The tokens are those of `PreferenceDataset`.
    - `append_eos=False`: the template with the prompt and the response as one text, with the tokenizer's own special
      tokens and no others; the whole of a rendered chat template, with what it writes after the turn. Most published
      reward models were trained so.
    - `as_pair`: as the tokenizer joins two texts, for cross-encoders.

    Models that read their answer at the last token do so here at the last token of the row, also where that is the
    token they pad with (transformers would take the one before it), and in float32.

    Args:
        path, name, settings: fields of `forge.verifiers.spec.RewardModelSettings`.

    Raises:
        ValueError: settings that do not go together or with the model; says which. OSError: no such model.
    """

    def __init__(self, path: str | Path, name: str | None = None, **settings: Any) -> None:
        how = RewardModelSettings(path=str(path), name=name, **settings)
        self.of = BatchedModel(how, AutoModelForSequenceClassification)
        self.names: tuple[str, ...] = (name or Path(path).name,)
        tokenizer, append_eos, chat = self.of.tokenizer, how.append_eos, bool(how.chat_template)
        texts = (how.prompt_template, how.chat_template, how.system_prompt, how.chat_options)
        self._format = prompt_format(tokenizer, how)
        if append_eos is None and not how.as_pair:
            ids = tokenizer("a")["input_ids"]
            ends = bool(ids) and ids[-1] in tokenizer.all_special_ids and ids[-1] != tokenizer.unk_token_id
            append_eos = chat or not ends  # not where the tokenizer ends texts with a special token of its own
            if how.truncate and not append_eos:
                raise ValueError(TRUNCATE)
        if append_eos and not chat and tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {path} has no eos token to end an answer with: set append_eos to False")
        self._as_pair, self._append_eos, self._truncate = how.as_pair, append_eos, how.truncate
        self._label = class_of(self.of.model, how.label)
        self._scale, self._slope, self._intercept = how.scale, how.slope, how.intercept
        head = getattr(self.of.model, "score", None)
        self._at_last_token: nn.Linear | None = head if isinstance(head, nn.Linear) else None
        self._settings = (*texts, how.as_pair, append_eos, how.label)
        self._batcher: Batcher[tuple[str, str], Any] = Batcher(self._compute, self.names[0])

    @property
    def progress(self) -> int:
        """Responses that it has read."""
        return self._batcher.progress

    @cached_property
    def fingerprint(self) -> str:
        """Reads all weights, once."""
        numbers = (self._scale, self._slope, self._intercept, self._truncate, self.of.max_tokens)
        return f"reward model {self.of.identity} {self._settings} {numbers}"

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """One number for each response."""
        return Scores.of(await self._batcher([(prompt, response) for response in responses]), 1)

    async def close(self) -> None:
        """Ends the thread; calls that wait fail."""
        self._batcher.close()

    def tokens(self, prompt: str, response: str) -> list[int]:
        """What the model reads. ValueError: they cannot be encoded."""
        return self.rows([(prompt, response)])[0].ids

    def _compute(self, texts: list[tuple[str, str]], wanted: Callable[[int], bool]) -> Iterator[tuple[int, Any]]:
        try:
            rows: Sequence[Row | Exception] = self.rows(texts)
        except Exception:  # one by one, to find whose fault it is
            rows = [row_or_error(lambda *text: self.rows([text])[0], *text) for text in texts]
        return self.of.stream(rows, self._read, wanted)

    def rows(self, texts: Sequence[tuple[str, str]]) -> list[Row]:
        """What the model reads of each (prompt, response)."""
        tokenizer, limit, chat = self.of.tokenizer, self.of.max_tokens, self._format.chat
        prompts = {prompt: self._format.render({"question": prompt})[0] for prompt, _ in texts}
        responses = [response for _, response in texts]
        if self._as_pair:
            cut: dict[str, Any] = {"truncation": "longest_first", "max_length": limit} if self._truncate else {}
            return _read_rows(tokenizer([prompts[prompt] for prompt, _ in texts], responses, **cut))
        if chat is not None and self._append_eos:
            return [Row(closed(*self._format.answered(prompts[prompt], response))[0]) for prompt, response in texts]
        if not self._append_eos:
            joined = [whole(self._format, prompt, response) for prompt, response in texts]
            return _read_rows(tokenizer(joined, add_special_tokens=chat is None))
        # The tokens of `PromptFormat.answered`, many at a time.
        before = {prompt: list(self._format.encode(text)[1]) for prompt, text in prompts.items()}
        answers = tokenizer(responses, add_special_tokens=False)["input_ids"]
        rows = [
            [*before[prompt], *answer, tokenizer.eos_token_id]
            for (prompt, _), answer in zip(texts, answers, strict=True)
        ]
        for i, (prompt, _) in enumerate(texts):
            # At least one token of the response stays, or the row is left too long and so without a score.
            if self._truncate and len(before[prompt]) + 1 < limit < len(rows[i]):
                rows[i] = [*rows[i][: limit - 1], rows[i][-1]]
        return list(map(Row, rows))

    def logits(self, batch: Padded) -> Tensor:
        """[rows] before calibration, float32."""
        model: Any = self.of.model
        if self._at_last_token is None:
            logits = model(**batch.inputs).logits.float()
        else:
            states = model.base_model(**batch.inputs, use_cache=False)[0]
            last = states[torch.arange(len(states), device=states.device), batch.lengths - 1].float()
            bias = self._at_last_token.bias
            logits = F.linear(last, self._at_last_token.weight.float(), None if bias is None else bias.float())
        if logits.shape[1] == 1 or model.config.problem_type in NOT_EXCLUSIVE:
            return logits[:, self._label]
        others = [i for i in range(logits.shape[1]) if i != self._label]
        return logits[:, self._label] - logits[:, others].logsumexp(1)

    def _read(self, batch: Padded) -> list[float]:
        x = self._slope * self.logits(batch) + self._intercept
        return (x.sigmoid() if self._scale == "probability" else x).tolist()


def _read_rows(encoded: Any) -> list[Row]:
    ids = encoded["input_ids"]
    return [Row(*both) for both in zip(ids, encoded.get("token_type_ids") or [None] * len(ids), strict=True)]
