"""A verifier that scores responses by a reward model or cross-encoder: any sequence classifier of Hugging Face."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from forge.data.supervised import close_tokens
from forge.rewards.verifier import Scores
from forge.types import Conversation

from .config import RewardModelSettings
from .models import Inputs, ModelVerifier, TokenRow

# The problem types of heads whose classes do not exclude each other.
NOT_EXCLUSIVE = ("multi_label_classification", "regression")


class RewardModel(ModelVerifier[float]):
    """A verifier whose score is the calibrated logit of a sequence classifier, for its only class or the class `label`.

    A response that is too long for the model is unscored.

    The model reads the prompt and the response in one of three forms:

    - by default, as this library trains reward models: the prompt in `prompt_template`, the response, and eos; or, with
      a chat template, the conversation of both up to the end of the answer's turn. The tokens are those of
      `PreferenceDataset`.
    - with `append_eos=False`, as most published reward models: the prompt in the template and the response as one text
      with the special tokens that the tokenizer adds; or, with a chat template, all that it renders.
    - with `as_pair`, as cross-encoders: as two texts, which the tokenizer joins.

    If the model has a linear head named `score`, the logit is the row's last token's, computed in float32, even
    if this is the padding token, for which transformers would use the token before it.

    Args:
        path, name, settings: fields of `forge_verifiers.config.RewardModelSettings`.

    Raises:
        ValueError: a setting is invalid, or does not fit the model.
        OSError: there is no such model.
    """

    def __init__(self, path: str | Path, name: str | None = None, **settings: Any) -> None:
        section = RewardModelSettings(path=str(path), name=name, **settings)
        self.names: tuple[str, ...] = (name or Path(path).name,)
        super().__init__(section, AutoModelForSequenceClassification, self.names[0])
        tokenizer = self.model.tokenizer
        append_eos = section.append_eos
        chat = bool(section.chat_template)

        # By default eos ends the response, unless the tokenizer itself ends every text with a special token.
        if append_eos is None and not section.as_pair:
            ids = tokenizer("a")["input_ids"]
            has_end = bool(ids) and ids[-1] in tokenizer.all_special_ids and ids[-1] != tokenizer.unk_token_id
            append_eos = chat or not has_end

        if append_eos and not chat and tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {path} has no eos token to append to responses: set append_eos to False"
            )
        self._settings = section
        self._append_eos = append_eos
        self._label = self.model.class_index(section.label)

        head = getattr(self.model.model, "score", None)
        self._at_last_token: nn.Linear | None = head if isinstance(head, nn.Linear) else None

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, 1] of the responses to one prompt; NaN with a reason where one is unscored."""
        return Scores.from_outcomes(await self.read(prompt, responses), 1)

    def row(self, prompt: str, response: str) -> TokenRow:
        """Return the tokens that the model reads, in one of the forms that the class describes.

        The texts of special tokens in the response are broken by a space.
        """
        response = self.model.special.inert(response)
        if self._append_eos:
            return TokenRow(close_tokens(*self.model.format.answered(self.model.row_of(prompt), response))[0])
        if not self._settings.as_pair:
            return self.model.encode(prompt, response)
        question = self.model.row_of(prompt)["question"]
        plain = question if isinstance(question, str) else Conversation(prompt).plain
        text = self.model.format.render({"question": plain})[0]
        encoded: Any = self.model.tokenizer([text], [response])  # lists: "" would be no second text
        return TokenRow(encoded["input_ids"][0], encoded.get("token_type_ids", [None])[0])

    def logits(self, inputs: Inputs) -> Tensor:
        """Return the logits [rows] of the class before calibration, in float32.

        If the classes exclude each other, they are log-odds of the class against all others.
        """
        model: Any = self.model.model
        if self._at_last_token is None:
            logits = model(**inputs).logits.float()
        else:
            states = model.base_model(**inputs, use_cache=False)[0]
            last_positions = inputs["attention_mask"].sum(1) - 1
            last_states = states[torch.arange(len(states), device=states.device), last_positions].float()
            bias = self._at_last_token.bias
            logits = F.linear(last_states, self._at_last_token.weight.float(), None if bias is None else bias.float())
        if logits.shape[1] == 1 or model.config.problem_type in NOT_EXCLUSIVE:
            return logits[:, self._label]
        other_classes = [label for label in range(logits.shape[1]) if label != self._label]
        return logits[:, self._label] - logits[:, other_classes].logsumexp(1)

    def outcomes(self, inputs: Inputs) -> list[float]:
        """Return the calibrated score of each row."""
        calibrated = self._settings.slope * self.logits(inputs) + self._settings.intercept
        return (calibrated.sigmoid() if self._settings.scale == "probability" else calibrated).tolist()
