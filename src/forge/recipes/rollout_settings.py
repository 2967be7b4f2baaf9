"""How a run samples: the part of `grpo` (or `rollout`) that bounds what is drawn."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat

from ..config.sections import Section


class RolloutSettings(Section):
    """Bounds of sampling, of rollouts and evaluations. The log-probabilities that are recorded and trained are those of
    the policy at `temperature`, before any of these excludes a token: nothing is renormalised."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most probable tokens that have this probability together; 1: all."""
    top_k: NonNegativeInt = 0
    """Draw from so many of the most probable tokens; 0: all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Exclude tokens that are less likely than this share of the most probable."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1, make tokens that prompt or answer have less likely: logits above 0 are divided by it, others
    multiplied."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end an answer, of which they are a part."""
    bad_words: list[str] = Field(default_factory=list)
    """Texts whose usual tokens are never drawn."""

    BOUNDS: ClassVar[tuple[str, ...]] = ("top_p", "top_k", "min_p", "repetition_penalty", "bad_words")

    @property
    def excluding(self) -> list[str]:
        """The settings by which tokens are drawn from something else than the policy's distribution."""
        # Of the class: an algorithm's own defaults are those of this section.
        defaults = type(self)()
        return [name for name in self.BOUNDS if self[name] != defaults[name]]

    def sampling(self) -> dict[str, Any]:
        """The fields of `forge.types.Sampling` that differ from its defaults."""
        fields = {name: self[name] for name in (*self.excluding, *(["stop"] if self.stop else []))}
        texts = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return fields | texts | ({"logprobs_of": "policy"} if self.excluding else {})

    def _check(self) -> None:
        for name in ("stop", "bad_words"):
            if not all(self[name]):
                raise ValueError(f"{name} has an empty text: omit it")
