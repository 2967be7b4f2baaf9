"""Settings of verifiers that are models or judges: items of a `verifiers` section, and what the verifiers take."""

from __future__ import annotations

import os
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ..config import Section
from .texts import BLANK_LINE, check_joining, check_prompt, check_steps

TEMPLATE = (
    "Problem:\n{prompt}\n\nProposed answer:\n{response}\n\n"
    "Is the proposed answer correct? Answer with yes or no, and nothing else."
)


class StoredSettings(Section):
    """A model and how it is held."""

    path: str
    """Folder or hub id."""
    name: str | None = None
    """Of the column; null: the folder's."""
    device: str | None = None
    """Null: the GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of its computation."""
    batch_tokens: PositiveInt = 8192
    """Most tokens of a forward pass, padding included, unless a single row has more."""


class ModelSettings(StoredSettings):
    """How a model reads texts."""

    prompt_template: str = "{question}"
    """Text with `{question}`, which the prompt replaces."""
    chat_template: bool | str = False
    """As of a dataset."""
    system_prompt: str | None = None
    """As of a dataset."""
    chat_options: dict[str, Any] | None = None
    """As of a dataset."""
    max_tokens: PositiveInt | None = None
    """Longest row; null: the limit of model and tokenizer."""

    def _check(self) -> None:
        check_prompt(self.prompt_template, self.chat_template, self.system_prompt, self.chat_options)

    def check_sources(self, where: str) -> None:
        """ValueError: the folder does not exist, or has no model in it."""
        folder = Path(self.path)
        is_local = self.path.startswith((".", "/", "~")) or folder.exists() or len(folder.parts) > 2
        is_local = is_local or ("/" in self.path and folder.parent.is_dir())  # a mistyped name in a folder
        if is_local and not (folder / "config.json").is_file():
            raise ValueError(f"{where}.path: {self.path} is no folder with a model (config.json) in it")


class RewardModelSettings(ModelSettings):
    """A sequence classifier, see `forge.verifiers.RewardModel`."""

    as_pair: bool = False
    """Give prompt and response as two texts, for cross-encoders."""
    append_eos: bool | None = None
    """Close the response with eos; null: true, except for a pair, or with a tokenizer that ends texts itself."""
    label: str | int | None = None
    """The class, by name or number, of a model of several."""
    scale: Literal["logit", "probability"] = "logit"
    """`logit` (of several classes the log-odds against the others, unless the model's problem_type says that they do
    not exclude each other), or `probability`, its sigmoid."""
    slope: float = 1.0
    """The logit x counts as `slope * x + intercept`, as Platt calibration gives them."""
    intercept: float = 0.0
    """See `slope`."""
    truncate: bool = False
    """Cut what is too long at the end of the response, where eos still closes it, or of a pair at the end of the longer
    text; not with a chat template."""

    def _check(self) -> None:
        super()._check()
        check_joining(self.as_pair, self.append_eos, self.truncate, self.chat_template)


class ProcessRewardModelSettings(ModelSettings):
    """A model that reads steps, see `forge.verifiers.ProcessRewardModel`."""

    marker: str
    """Text after each step, one token at its end, at which the model reads the step, such as " ки"."""
    separator: str = BLANK_LINE
    """Regular expression at which a response is cut into steps; steps of white space alone do not count."""
    joint: str = ""
    """Text between a marker and the next step."""
    good: str | None = None
    """For a causal language model: a text of one token, whose probability against `bad` is the score."""
    bad: str | None = None
    """See `good`."""
    label: str | int = 1
    """Which class of a token classifier, by name or number."""

    def _check(self) -> None:
        super()._check()
        check_steps(self.marker, self.separator, self.good, self.bad)


class JudgeSettings(Section):
    """A language model behind an OpenAI-compatible endpoint, see `forge.verifiers.LMJudge`."""

    url: str
    """Up to and with the version, such as http://127.0.0.1:8000/v1."""
    model: str
    """Its name at the endpoint."""
    name: str | None = None
    """Of the column; null: the model's."""
    template: str = TEMPLATE
    """Text with {response}, and {prompt} and {target} if wanted. With {target}, responses without one have no score."""
    system_prompt: str | None = None
    """Of a chat."""
    endpoint: Literal["chat", "completions"] = "chat"
    """Which API is called."""
    scoring: Literal["votes", "logprob"] = "votes"
    """`votes`, or `logprob` from the most probable tokens, of which an absent one counts as 0."""
    votes: PositiveInt = 1
    """Answers to each question, sampled at `temperature`."""
    temperature: NonNegativeFloat = 1.0
    """Of the votes."""
    yes: str = "yes"
    """Word of the verdict, in quotes in YAML, in any case. The last of `yes` and `no` that stands alone in an answer
    counts; as log-probabilities, the tokens that are one of them."""
    no: str = "no"
    """See `yes`."""
    max_tokens: PositiveInt = 16
    """Of an answer that is a vote."""
    top: PositiveInt = 5
    """Number of top log-probabilities asked for."""
    concurrency: PositiveInt = 8
    """Most responses at a time, and so most requests. A response keeps its turn between retries."""
    retries: NonNegativeInt = 4
    """How often a request is retried."""
    request_timeout: PositiveFloat = 30.0
    """Seconds for one request."""
    time_limit: PositiveFloat = 50.0
    """Seconds for one response from its turn on, retries included."""
    api_key_env: str | None = None
    """Environment variable that holds the key, sent as a bearer token."""
    prices: Annotated[tuple[float, float], Field(strict=False)] = (0.0, 0.0)
    """For a million tokens of questions, and of answers."""
    budget: float | None = None
    """Nothing is asked once the cost has reached it; requests under way by then still count."""

    def _check(self) -> None:
        fields = {field for _, field, _, _ in Formatter().parse(self.template) if field is not None}
        yes, no = self.yes.strip(), self.no.strip()
        for bad, message in (
            (
                not self.url.startswith(("http://", "https://")),
                f"url must begin with http:// or https://, got {self.url!r}",
            ),
            ("response" not in fields, f"template must hold {{response}}: {self.template[:60]!r}"),
            (fields - {"prompt", "response", "target"}, "template knows {prompt}, {response} and {target} only"),
            (self.scoring == "logprob" and self.votes > 1, "scoring logprob asks once: leave votes at 1"),
            (
                self.votes > 1 and self.temperature == 0,
                "votes at temperature 0 are all the same: raise it, or set votes to 1",
            ),
            (not yes or not no or yes.lower() == no.lower(), "yes and no must be two different words"),
            (self.system_prompt is not None and self.endpoint != "chat", "system_prompt needs endpoint chat"),
            (self.budget is not None and not any(self.prices), "a budget needs prices"),
            (
                self.api_key_env is not None and not os.environ.get(self.api_key_env),
                f"api_key_env: the environment has no {self.api_key_env}",
            ),
        ):
            if bad:
                raise ValueError(message)
