"""Process reward models: a score for each step of a response, as columns of a verifier or as rewards of the steps."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from forge.rewards.verifier import Scores, Unscored

from .config import ProcessRewardModelSettings
from .models import Inputs, ModelVerifier, TokenRow

# Settings of language models that change the logits after the head; only the head is computed here.
_AFTER_HEAD = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "output_multiplier_scale",
    "lm_head_multiplier",
)


class ProcessRewardModel(ModelVerifier[list[float]]):
    """The probability that each step of a response is good; columns `<name>_min`, `_mean` and `_last`.

    Each step is followed by a marker token, at which the step is scored:

    - a token classifier (default), as TRL trains them: the probability of the class `label`;
    - with `good` and `bad`, a causal language model, as Math-Shepherd (Wang et al. 2024): the probability of the token
      `good` against `bad` as the next token.

    The text is the rendered prompt with all steps and markers, tokenized as a whole; special tokens that a response
    spells are broken by a space. A response that is too long, has
    no steps, or contains the marker, is unscored.

    Args:
        path, name, settings: fields of `forge_verifiers.config.ProcessRewardModelSettings`.

    Raises:
        ValueError: invalid settings, or settings that do not fit the model.
        OSError: no such model.
    """

    def __init__(self, path: str | Path, name: str | None = None, **settings: Any) -> None:
        section = ProcessRewardModelSettings(path=str(path), name=name, **settings)
        good, bad = section.good, section.bad
        self._separator, self._joint, self._marker = re.compile(section.separator), section.joint, section.marker
        name = name or Path(path).name
        super().__init__(section, AutoModelForTokenClassification if good is None else AutoModelForCausalLM, name)
        self.names: tuple[str, ...] = (f"{name}_min", f"{name}_mean", f"{name}_last")
        self._marker_id = self._last_token(section.marker)
        self._verdicts: tuple[int, int] | None = None

        self._class = 0
        if good is not None and bad is not None:
            # Only two rows of the head are computed: a model that changes its logits after it is not supported.
            self._verdicts = (self._last_token(good), self._last_token(bad))
            if self._verdicts[0] == self._verdicts[1]:
                raise ValueError(f"good {good!r} and bad {bad!r} end in the same token")
            config = self.model.model.config.get_text_config()
            if changed := [key for key in _AFTER_HEAD if getattr(config, key, None) not in (None, 1, 1.0)]:
                raise ValueError(f"{path} changes its logits after the head ({changed[0]}), which is not supported")
        else:
            self._class = self.model.class_index(section.label)

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Three numbers for each response, in [0, 1]."""
        probabilities = await self.read(prompt, responses)
        # np.min rather than min: it propagates NaN.
        return Scores.from_outcomes(
            [s if isinstance(s, Exception) else (float(np.min(s)), float(np.mean(s)), s[-1]) for s in probabilities], 3
        )

    def cut(self, response: str) -> list[tuple[str, int]]:
        """Return the steps of a response, each with the character at which it ends; none is only white space."""
        # The text between separators; an end is the character at which the next separator starts.
        ends = [(match.start(), match.end()) for match in self._separator.finditer(response)]
        starts = [0, *(end for _, end in ends)]
        spans = zip(starts, [*(start for start, _ in ends), len(response)], strict=True)
        return [(response[start:end], end) for start, end in spans if response[start:end].strip()]

    def row(self, prompt: str, response: str) -> TokenRow:
        """Return the prompt and all steps, each with its marker. Unscored: not every step has a marker."""
        steps = [step for step, _ in self.cut(response)]
        if not steps:
            raise Unscored("it has no steps")
        marked = self._joint.join(self.model.special.inert(step) + self._marker for step in steps)
        text = self.model.full_text(prompt, marked)
        ids = self.model.tokenizer(text, add_special_tokens=self.model.format.chat is None)["input_ids"]
        # Every step must be read at its marker, and no other token as one.
        if (count := ids.count(self._marker_id)) != len(steps):
            raise Unscored(
                f"it has {count} markers {self._marker!r} for {len(steps)} steps: "
                "the text contains the marker, or the tokenizer merges it"
            )
        return TokenRow(ids)

    def outcomes(self, inputs: Inputs) -> list[list[float]]:
        """Return the probabilities of the steps of each row."""
        model: Any = self.model.model
        # The marker's token may also be the padding token.
        at_marker = (inputs["input_ids"] == self._marker_id) & (inputs["attention_mask"] == 1)
        if self._verdicts is None:
            logits = model(**inputs).logits[at_marker].float()
            good = logits.softmax(-1)[:, self._class]
        else:
            states = model.base_model(**inputs, use_cache=False)[0][at_marker].float()
            # Two rows of the head are enough; the vocabulary's logits are not needed.
            head = model.get_output_embeddings()
            yes, no = (
                states @ head.weight[token].float() + (0.0 if head.bias is None else head.bias[token].float())
                for token in self._verdicts
            )
            good = (yes - no).sigmoid()

        return [part.tolist() for part in good.split(at_marker.sum(1).tolist())]

    def _last_token(self, text: str) -> int:
        ids = self.model.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids or ids[-1] == self.model.tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no token for {text!r}")
        return ids[-1]


class StepRewards:
    """Each step of a response earns `weight * p / steps` at its end, where p is the probability that a process reward
    model gives it: a response earns `weight` times the mean, however many steps it has.

    An algorithm with a critic assigns the rewards to the tokens before them; others see their sum, which is an error of
    the configuration.

    Args:
        model: fields of `forge_verifiers.config.ProcessRewardModelSettings`.
        weight: alongside other rewards.

    Raises:
        ValueError: an invalid setting.
    """

    gives_steps = True

    def __init__(self, model: Mapping[str, Any], weight: float = 1.0) -> None:
        self.settings, self.weight = ProcessRewardModelSettings(**model), weight
        self.names = (self.settings.name or "steps",)

    def check(self) -> None:
        """ValueError: the model's folder does not exist."""
        self.settings.check_sources("model")

    def setup(self) -> None:
        """Load the process reward model."""
        self._model = ProcessRewardModel(**self.settings)

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, 1], with the reward of each step in `Scores.steps`."""
        probabilities = await self._model.read(prompt, responses)
        sums: list[float | Exception] = []
        steps: list[list[tuple[int, float]]] = []
        for text, of_steps in zip(responses, probabilities, strict=True):
            if isinstance(of_steps, Exception):
                sums.append(of_steps)
                steps.append([])
            else:
                sums.append(self.weight * float(np.mean(of_steps)))
                cuts = zip(self._model.cut(text), of_steps, strict=True)
                steps.append([(end, self.weight * p / len(of_steps)) for (_, end), p in cuts])
        scores = Scores.from_outcomes(sums, 1)
        scores.steps = steps
        return scores

    async def close(self) -> None:
        """Free the model."""
        await self._model.close()
