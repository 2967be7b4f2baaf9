"""Settings of sampling: what may be drawn, how much of it, and by which weights."""

import math
from dataclasses import dataclass
from typing import Literal

TOP_LOGPROBS = 20  # most top logprobs of a request
# The versions of the weights that draw a sample, in order, each with the number of tokens that it draws.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings with which completions of one prompt are sampled.

    `n` is the number of completions. `temperature == 0` is greedy decoding. `top_p == 1` and `top_k == 0` are off.
    `stop_token_ids` end an answer, in addition to the model's end-of-sequence tokens. `seed` makes the samples of a
    request reproducible whatever else is in the batch; None draws one. `top_logprobs` is the number of most probable
    tokens to return at each position, at most 20. `grammar` is the text of a grammar of llguidance, in Lark or JSON:
    only texts that it accepts are drawn, unless `max_tokens` cuts them; "" is off. `repetition_penalty` above 1 lowers
    the probability of tokens that are in prompt or answer. The first of the texts `stop` ends the answer and is part of
    it.

    `images` are the prompt's, as in `forge.types.Prompt`. `logprobs_of` says which log-probabilities to return: of the
    distribution that tokens are drawn from ("drawn"), or at `temperature` before anything is excluded, which a trainer
    computes ("policy"). `schedule` has the `Spans` of each sample, for the embedded engine: a sample waits for the
    weights that draw its next token; () uses whatever weights are loaded.
    """

    n: int = 1
    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    grammar: str = ""
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs_of: Literal["drawn", "policy"] = "drawn"
    schedule: tuple[Spans, ...] = ()
    images: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        # A bool is an int for Python, but not a sensible number here.
        flags = [name for name in self.__slots__ if isinstance(getattr(self, name), bool)]

        for is_valid, message in (
            (not flags, f"{', '.join(flags)} must be a number, not true or false"),
            (self.n >= 1, f"n must be at least 1, got {self.n}"),
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (
                0 <= self.temperature < math.inf,
                f"temperature must be 0 (greedy), or finite and positive, got {self.temperature}",
            ),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or positive, got {self.top_k}"),
            (
                not isinstance(self.stop_token_ids, str) and all(type(token) is int for token in self.stop_token_ids),
                f"stop_token_ids must be token ids, got {self.stop_token_ids!r}",
            ),
            (
                isinstance(self.top_logprobs, int) and 0 <= self.top_logprobs <= TOP_LOGPROBS,
                f"top_logprobs must be 0 to {TOP_LOGPROBS}, got {self.top_logprobs!r}",
            ),
            (0 < self.repetition_penalty < math.inf, f"repetition_penalty must be > 0, got {self.repetition_penalty}"),
            (are_texts(self.stop), f"stop must be a list of texts, got {self.stop!r}"),
            (self.logprobs_of in ("drawn", "policy"), f"logprobs_of must be drawn or policy, got {self.logprobs_of!r}"),
            (
                not self.schedule or (len(self.schedule) == self.n and all(map(are_spans, self.schedule))),
                f"schedule must have the spans of each of the {self.n} samples, got {self.schedule!r:.200}",
            ),
            (isinstance(self.grammar, str), f"grammar must be a text, got a {type(self.grammar).__name__}"),
        ):
            if not is_valid:
                raise ValueError(message)

    @property
    def restricted(self) -> bool:
        """Return whether tokens are sampled from another distribution than the policy's at this temperature."""
        return self.top_p < 1 or self.top_k > 0 or self.repetition_penalty != 1 or bool(self.grammar)


def are_texts(value: object) -> bool:
    """Return whether a value is a list of texts, none of them empty.

    >>> are_texts(["stop"])
    True
    >>> are_texts([""])
    False
    """
    return isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)


def are_spans(spans: Spans) -> bool:
    """Return whether version spans of a sample are valid: not empty, with ascending versions from 0, each with at least
    one token.

    >>> are_spans(((3, 10), (4, 5)))
    True
    >>> are_spans(((4, 5), (3, 10)))
    False
    """
    versions = [version for version, _ in spans]
    is_ascending = versions == sorted({*versions})
    return bool(spans) and is_ascending and versions[0] >= 0 and all(count > 0 for _, count in spans)
