"""What the `episode` section of a recipe can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import ConfigError, Section
from .calls import SYNTAXES
from .templates import TEMPLATES

if TYPE_CHECKING:
    from .dialogue import Dialogue


@dataclass
class EpisodeConfig(Section):
    """The limits of an episode, see `forge.envs.rollout`, and how messages become tokens, see `forge.envs.Dialogue`:
    `max_tokens` null is training.seq_len, `template` true the tokenizer's own, `syntax` null the template's."""

    max_turns: int = 8
    max_tokens: int | None = None
    step_timeout: float = 60.0
    retries: int = 2
    template: bool | str = True
    syntax: str | None = None

    def validate(self, seq_len: int) -> None:
        if self.max_tokens is None:
            self.max_tokens = seq_len
        for bad, message in (
            (self.max_turns < 1 or self.retries < 0, "max_turns must be at least 1, and retries at least 0"),
            (not 2 <= self.max_tokens <= seq_len, f"max_tokens must be from 2 to training.seq_len = {seq_len}"),
            (self.step_timeout <= 0, "step_timeout must be above 0"),
            (self.template is False, "template must be true, a name, a jinja template or a file: turns need one"),
            (self.syntax not in (None, *SYNTAXES), f"syntax must be null or one of {', '.join(SYNTAXES)}"),
        ):
            if bad:
                raise ConfigError(f"episode.{message}")

    def limits(self) -> dict[str, Any]:
        """Of `forge.envs.rollout`."""
        return {name: self[name] for name in ("max_turns", "max_tokens", "step_timeout", "retries")}

    @property
    def files(self) -> list[str]:
        """All that is read and may be a file of this machine."""
        return [self.template] if isinstance(self.template, str) and self.template not in TEMPLATES else []

    def dialogue(self, model: str) -> Dialogue:
        """Between messages and the tokens of a model's folder. ValueError, FileNotFoundError: see `Dialogue`."""
        from transformers import AutoTokenizer

        from .dialogue import Dialogue

        return Dialogue(AutoTokenizer.from_pretrained(model), self.template, self.syntax)  # type: ignore[arg-type]
