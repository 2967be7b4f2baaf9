"""The `episode` section of a recipe."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ..config.plugin import resolve
from ..config.sections import Section

BUILT_IN = ("plain", "chatml", "llama3")  # chat templates of forge_envs.dialogue


class EpisodeConfig(Section):
    """The limits of an episode ([environments.md](environments.md)), and how messages become tokens."""

    max_turns: PositiveInt = 8
    """Most turns of an episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Most tokens of an episode, including the environment's; null: `training.seq_len`."""
    step_timeout: PositiveFloat = 60.0
    """Seconds for an environment's answer."""
    retries: NonNegativeInt = 2
    """How often an episode that lost its environment is played again."""
    template: bool | str = True
    """True: the tokenizer's chat template; or `plain`, `chatml`, `llama3`, a jinja template or its file."""
    syntax: str | None = None
    """How tool calls are written; null: found out from the template."""
    chat_options: dict[str, Any] | None = None
    """Additional arguments of the chat template, such as enable_thinking."""
    thoughts: Literal["keep", "template"] = "keep"
    """Of earlier turns: `keep` leaves them in the context, as they were sampled; `template` does what the template
    does, and each turn that thereby changes the context starts a new branch of the episode."""

    agent: dict[str, Any] | None = None
    """An agent that plays the episodes, instead of `environment` ([agent_gateway.md](agent_gateway.md))."""

    def _check(self) -> None:
        if self.syntax is not None:
            resolve("forge_envs.calls:check_syntax", "episode.syntax")(self.syntax)
        if self.template is False:
            raise ValueError(
                "episode.template must be true, a template name, a jinja template or a file, because turns need a "
                "chat template"
            )

    def limits(self) -> dict[str, Any]:
        """Return the limits of an episode as arguments of `forge_envs.rollout`."""
        return {name: self[name] for name in ("max_turns", "max_tokens", "step_timeout", "retries")}

    @property
    def files(self) -> list[str]:
        """Return the paths in this section that may be local files: the template, unless it is a built-in one."""
        return [self.template] if isinstance(self.template, str) and self.template not in BUILT_IN else []

    def dialogue(self, model: str) -> Any:
        """Return the `forge_envs.Dialogue` of this section, which turns messages into tokens with the tokenizer in the
        folder `model`. ValueError: the chat template does not fit the settings."""
        # Imported here, as it takes seconds, and only episodes of several turns need it.
        from ..models.tokenizer import open_tokenizer

        tokenizer: Any = open_tokenizer(model)
        make_dialogue = resolve("forge_envs.dialogue:Dialogue", "episode")
        return make_dialogue(tokenizer, self.template, self.syntax, self.chat_options, self.thoughts)
