"""Process reward models, which score each step of a response: as a verifier, or as rewards of the steps."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from forge.rewards.verifier import Scores, Unscored

from .config import ProcessRewardModelSettings
from .models import Inputs, ModelVerifier, TokenRow

# Settings of language models with which they change the logits after the head. Here only the head is computed.
_AFTER_HEAD = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "output_multiplier_scale",
    "lm_head_multiplier",
)


class ProcessRewardModel(ModelVerifier[list[float]]):
    """A verifier whose model gives each step of a response the probability that it is good.

    Its columns are the minimum, the mean and the last of these: `<name>_min`, `<name>_mean` and `<name>_last`.

    Each step is followed by a marker token, at which the model scores the step:

    - a token classifier (the default), as TRL trains them, by the probability of the class `label`;
    - with `good` and `bad`, a causal language model, as Math-Shepherd (Wang et al. 2024), by the probability of the
      token `good` against the token `bad` as the next token.

    The model reads the rendered prompt with all steps and markers, tokenized as one text. The texts of special tokens
    in a response are broken by a space. A response that is too long, has no steps, or contains the marker is unscored.

    Args:
        path, name, settings: fields of `forge_verifiers.config.ProcessRewardModelSettings`.

    Raises:
        ValueError: a setting is invalid, or does not fit the model.
        OSError: there is no such model.
    """

    def __init__(self, path: str | Path, name: str | None = None, **settings: Any) -> None:
        section = ProcessRewardModelSettings(path=str(path), name=name, **settings)
        good, bad = section.good, section.bad
        self._separator, self._joint, self._marker = re.compile(section.separator), section.joint, section.marker
        name = name or Path(path).name
        super().__init__(section, AutoModelForTokenClassification if good is None else AutoModelForCausalLM, name)
        self.names: tuple[str, ...] = (f"{name}_min", f"{name}_mean", f"{name}_last")
        self._marker_id = self._last_token(section.marker)
        self._verdicts: tuple[int, int] | None = None  # the tokens `good` and `bad` of a causal language model

        self._class = 0
        if good is not None and bad is not None:
            self._verdicts = (self._last_token(good), self._last_token(bad))
            if self._verdicts[0] == self._verdicts[1]:
                raise ValueError(f"good {good!r} and bad {bad!r} must end in different tokens")
            config = self.model.model.config.get_text_config()
            if changed := [key for key in _AFTER_HEAD if getattr(config, key, None) not in (None, 1, 1.0)]:
                raise ValueError(f"{path} scales or caps its logits ({changed[0]}), which is not supported")
        else:
            self._class = self.model.class_index(section.label)

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, 3] of the responses to one prompt, from 0 to 1; NaN with a reason if unscored."""
        # np.min rather than min: it propagates NaN.
        return Scores.from_outcomes(
            [
                steps if isinstance(steps, Exception) else (float(np.min(steps)), float(np.mean(steps)), steps[-1])
                for steps in await self.read(prompt, responses)
            ],
            3,
        )

    def cut(self, response: str) -> list[tuple[str, int]]:
        """Return the steps of a response, each with the index of the character after it.

        Steps are the texts between separators, except those of white space only.
        """
        separators = list(self._separator.finditer(response))
        starts = [0, *(separator.end() for separator in separators)]
        ends = [*(separator.start() for separator in separators), len(response)]
        return [
            (response[start:end], end) for start, end in zip(starts, ends, strict=True) if response[start:end].strip()
        ]

    def row(self, prompt: str, response: str) -> TokenRow:
        """Return the tokens of the prompt and of all steps, each with its marker.

        Raises:
            Unscored: there are no steps, or the tokens do not have one marker for each of them.
        """
        steps = [step for step, _ in self.cut(response)]
        if not steps:
            raise Unscored("the response has no steps")
        marked_steps = self._joint.join(self.model.special.inert(step) + self._marker for step in steps)
        row = self.model.encode(prompt, marked_steps)
        if (count := row.ids.count(self._marker_id)) != len(steps):
            raise Unscored(
                f"the text has {count} markers {self._marker!r} for {len(steps)} steps: the response contains the "
                "marker, or the tokenizer merges it"
            )
        return row

    def outcomes(self, inputs: Inputs) -> list[list[float]]:
        """Return the probabilities that the steps are good, in one list for each row."""
        model: Any = self.model.model
        # With the mask, as the marker's token may also be the padding token.
        at_marker = (inputs["input_ids"] == self._marker_id) & (inputs["attention_mask"] == 1)
        if self._verdicts is None:
            good = model(**inputs).logits[at_marker].float().softmax(-1)[:, self._class]
        else:
            states = model.base_model(**inputs, use_cache=False)[0][at_marker].float()
            # Only the head's rows of the two tokens are multiplied, not those of the whole vocabulary.
            head = model.get_output_embeddings()
            good_logits, bad_logits = (
                states @ head.weight[token].float() + (0.0 if head.bias is None else head.bias[token].float())
                for token in self._verdicts
            )
            good = (good_logits - bad_logits).sigmoid()

        # `good` has the steps of all rows one after the other.
        return [probabilities.tolist() for probabilities in good.split(at_marker.sum(1).tolist())]

    def _last_token(self, text: str) -> int:
        # Return the id of a text's last token; ValueError if the tokenizer has no token for it.
        ids = self.model.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids or ids[-1] == self.model.tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no token for {text!r}")
        return ids[-1]


class StepRewards:
    """A verifier that rewards each step of a response at its end, by a process reward model.

    A step to which the model gives the probability p has the reward `weight * p / steps`, so that the rewards of a
    response add up to `weight` times the mean of p, however many steps it has.

    Only an algorithm with a critic credits the rewards to the tokens before them; with others the configuration is
    rejected, as they would use the sum only.

    Args:
        model: fields of `forge_verifiers.config.ProcessRewardModelSettings`.
        weight: the factor of the rewards, relative to other rewards.

    Raises:
        ValueError: a setting is invalid.
    """

    gives_steps = True

    def __init__(self, model: Mapping[str, Any], weight: float = 1.0) -> None:
        self.settings, self.weight = ProcessRewardModelSettings(**model), weight
        self.names = (self.settings.name or "steps",)

    def check(self) -> None:
        """Raise ValueError if the path is a local folder without a model."""
        self.settings.check_sources("model")

    def setup(self) -> None:
        """Load the process reward model."""
        self._model = ProcessRewardModel(**self.settings)

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, 1], the sums of the steps' rewards, which are in `Scores.steps`."""
        outcomes = await self._model.read(prompt, responses)
        sums: list[float | Exception] = []
        step_rewards: list[list[tuple[int, float]]] = []  # of each response: (index of the character after it, reward)
        for response, probabilities in zip(responses, outcomes, strict=True):
            if isinstance(probabilities, Exception):
                sums.append(probabilities)
                step_rewards.append([])
            else:
                sums.append(self.weight * float(np.mean(probabilities)))
                steps = zip(self._model.cut(response), probabilities, strict=True)
                step_rewards.append([(end, self.weight * p / len(probabilities)) for (_, end), p in steps])
        scores = Scores.from_outcomes(sums, 1)
        scores.steps = step_rewards
        return scores

    async def close(self) -> None:
        """Free the model."""
        await self._model.close()
