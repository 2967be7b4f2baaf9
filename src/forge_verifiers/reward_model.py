"""Reward models and cross-encoders: any Hugging Face sequence classifier."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from forge.data.supervised import close_tokens
from forge.rewards.verifier import Scores

from .config import RewardModelSettings
from .models import Inputs, ModelVerifier, TokenRow

NOT_EXCLUSIVE = ("multi_label_classification", "regression")  # heads whose classes are independent


class RewardModel(ModelVerifier[float]):
    """One number for each response: the logit of a sequence classifier with one class, or for one of several.

    A response that is too long is unscored.

    The text of prompt and response:

    - default, as this library trains reward models: `prompt_template` with the prompt, the response, and eos, or the
      conversation of both up to the end of the answer's turn. The tokens match `PreferenceDataset`.
    - `append_eos=False`, as most published reward models: the template with the prompt and the response as one text,
      with the tokenizer's own special tokens only; of a chat template all that it renders.
    - `as_pair`, for cross-encoders: as the tokenizer joins two texts.

    Models with a linear head `score` are read at the last token of the row, in float32, also where that token is the
    padding token (transformers would use the token before it).

    Args:
        path, name, settings: fields of `forge_verifiers.config.RewardModelSettings`.

    Raises:
        ValueError: invalid settings, or settings that do not fit the model.
        OSError: no such model.
    """

    def __init__(self, path: str | Path, name: str | None = None, **settings: Any) -> None:
        section = RewardModelSettings(path=str(path), name=name, **settings)
        self.names: tuple[str, ...] = (name or Path(path).name,)
        super().__init__(section, AutoModelForSequenceClassification, self.names[0])
        tokenizer = self.model.tokenizer
        append_eos = section.append_eos
        chat = bool(section.chat_template)

        # Unset: eos closes the response, unless the tokenizer ends every text with a special token.
        if append_eos is None and not section.as_pair:
            ids = tokenizer("a")["input_ids"]
            ends = bool(ids) and ids[-1] in tokenizer.all_special_ids and ids[-1] != tokenizer.unk_token_id
            append_eos = chat or not ends  # some tokenizers end every text with a special token

        if append_eos and not chat and tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {path} has no eos token to end an answer with: set append_eos to False")
        self._as_pair = section.as_pair
        self._append_eos = append_eos
        self._label = self.model.class_index(section.label)
        self._scale = section.scale
        self._slope = section.slope
        self._intercept = section.intercept

        head = getattr(self.model.model, "score", None)
        self._at_last_token: nn.Linear | None = head if isinstance(head, nn.Linear) else None

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return one number for each response."""
        return Scores.from_outcomes(await self.read(prompt, responses), 1)

    def tokens(self, prompt: str, response: str) -> list[int]:
        """Return the model's input tokens. ValueError: the texts cannot be encoded."""
        return self.row(prompt, response).ids

    def row(self, prompt: str, response: str) -> TokenRow:
        """Return the model's input. Special tokens that a response spells are broken by a space."""
        response = self.model.special.inert(response)
        tokenizer, form = self.model.tokenizer, self.model.format
        text = form.render({"question": prompt})[0]
        # Three forms: prompt and answer as in training, a pair as the tokenizer joins it, or one text.
        if self._append_eos:
            return TokenRow(close_tokens(*form.answered(text, response))[0])
        if self._as_pair:
            encoded: Any = tokenizer([text], [response])  # in lists: alone, "" would be no second text
        else:
            encoded = tokenizer([self.model.full_text(prompt, response)], add_special_tokens=form.chat is None)
        return TokenRow(encoded["input_ids"][0], encoded.get("token_type_ids", [None])[0])

    def logits(self, inputs: Inputs) -> Tensor:
        """[rows] before calibration, float32."""
        model: Any = self.model.model
        if self._at_last_token is None:
            logits = model(**inputs).logits.float()
        else:
            states = model.base_model(**inputs, use_cache=False)[0]
            ends = inputs["attention_mask"].sum(1) - 1
            last = states[torch.arange(len(states), device=states.device), ends].float()
            bias = self._at_last_token.bias
            logits = F.linear(last, self._at_last_token.weight.float(), None if bias is None else bias.float())
        # One class, or independent ones: its logit. Exclusive ones: the log-odds against all others.
        if logits.shape[1] == 1 or model.config.problem_type in NOT_EXCLUSIVE:
            return logits[:, self._label]
        other_classes = [i for i in range(logits.shape[1]) if i != self._label]
        return logits[:, self._label] - logits[:, other_classes].logsumexp(1)

    def outcomes(self, inputs: Inputs) -> list[float]:
        """Return the calibrated score of each row."""
        x = self._slope * self.logits(inputs) + self._intercept
        return (x.sigmoid() if self._scale == "probability" else x).tolist()
