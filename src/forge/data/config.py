"""What the `dataset` section of a recipe can be told, for each kind of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from forge.config import ConfigError, Section, build


@dataclass
class RowsConfig(Section):
    """Where rows come from and how prompts are made of them, see `forge.data.dataset.PromptDataset`.

    `sources` are several datasets, each with a `weight` and the settings in which it differs from the others.
    """

    kind: ClassVar[Literal["prompts", "supervised", "preferences"]]

    path: str | None = None
    task: str | None = None
    sources: list[dict[str, Any]] | None = None
    difficulty: int | list[int] = 5
    split: str = "train"
    subset: str | None = None
    streaming: bool = False
    shuffle: bool = True
    prompt_field: str | None = None
    prompt_template: str = "{question}"
    chat_template: bool | str = False
    system_prompt: str | None = None
    chat_options: dict | None = None

    def validate(self) -> None:
        if [self.path, self.task, self.sources].count(None) != 2:
            raise ConfigError("dataset needs either a path (file, folder or hub id), a task, or sources")
        for number, source in enumerate(self.sources or ()):
            where = f"dataset.sources[{number}]"
            build(type(self), {name: value for name, value in source.items() if name != "weight"}, where)
            weight = source.get("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
                raise ConfigError(f"{where}.weight must be a number above 0, got {weight!r}")
            if "sources" in source:
                raise ConfigError(f"{where} has sources of its own: put them beside it")

    def bound(self, key: str, most: int, message: str) -> None:
        """Nothing may have more than `most` tokens: the default where `key` is not set, of the whole or of a source.

        Raises:
            ConfigError: `message`.
        """
        if getattr(self, key) is None:
            setattr(self, key, most)
        if any(
            length > most for length in (getattr(self, key), *(source.get(key) or 0 for source in self.sources or ()))
        ):
            raise ConfigError(message)

    @property
    def paths(self) -> list[str]:
        """All paths that are named."""
        return self._all("path")

    @property
    def files(self) -> list[str]:
        """All that is read and may be a file of this machine: data, and chat templates."""
        return [*self.paths, *self._all("chat_template")]

    def _all(self, key: str) -> list[str]:
        named = [getattr(self, key), *(source.get(key) for source in self.sources or ())]
        return [name for name in named if isinstance(name, str)]

    @property
    def procedural(self) -> bool:
        """All of it is made by tasks, which hold problems out themselves."""
        return self.task is not None or (self.sources is not None and not self.paths)


@dataclass
class DatasetConfig(RowsConfig):
    """Prompts with the targets that answers are compared with."""

    kind = "prompts"

    target_field: str | None = "answer"
    target_pattern: str | None = None
    max_prompt_tokens: int | None = None
    too_long: Literal["skip", "error"] = "skip"


@dataclass
class SupervisedConfig(RowsConfig):
    """Conversations, prompts with answers, or plain text, see `forge.data.supervised.SupervisedDataset`."""

    kind = "supervised"

    target_field: str | None = "answer"
    target_pattern: str | None = None
    messages_field: str | None = None
    text_field: str | None = None
    train_on: Literal["assistant", "last"] = "assistant"
    weight_field: str | None = None
    epochs: int | None = None
    max_tokens: int | None = None
    too_long: Literal["skip", "truncate", "error"] = "skip"


@dataclass
class PreferencesConfig(RowsConfig):
    """Pairs of answers of which one is preferred, see `forge.data.preferences.PreferenceDataset`."""

    kind = "preferences"

    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    epochs: int | None = None
    max_tokens: int | None = None
    too_long: Literal["skip", "error"] = "skip"
