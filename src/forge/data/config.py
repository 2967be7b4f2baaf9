"""The `dataset` section of a recipe, for each kind of data."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt

from ..config.sections import ConfigError, Section, build
from .files import PathOrRows


class RowsConfig(Section):
    """Origin of dataset rows, and the prompts that are made of the rows."""

    kind: ClassVar[Literal["prompts", "supervised", "preferences"]]

    path: PathOrRows = None
    """.json, .jsonl, .csv, .tsv (cells are text) or .parquet file, a folder that `datasets` loads, or a hub id
    (`pip install datasets` for these and .parquet). In columns, null keys within a column are absent: they belong to
    other rows."""
    task: str | None = None
    """Instead of a path, a procedural task."""
    sources: list[dict[str, Any]] | None = None
    """Instead of a path or task, a list of datasets: each has a `weight` and the keys of this section in which it
    differs; they are interleaved so that each is always within one item of its share."""
    difficulty: int | list[int] = 5
    """Difficulty of a task: a length, a number of digits or of steps, or `[low, high]`."""
    split: str = "train"
    """Split of a folder or hub id; a file has none."""
    subset: str | None = None
    """The configuration of a hub dataset that has several."""
    streaming: bool = False
    """Read rows as they are needed; shuffles within blocks of 1000. An unusable row is skipped, logged
    and counted in `data/skipped`; in stored data it is an error before the run starts."""
    shuffle: bool = True
    """A new order each epoch, by seed."""
    prompt_field: str | None = None
    """Column of the question; null finds question, prompt, problem or input."""
    prompt_template: str = "{question}"
    """Text with `{question}` or any column in braces."""
    choices_field: str | list[str] | None = None
    """For multiple choice: the column with the list of options, or the columns of the options, which are shuffled by
    the question. `{choices}` in the template stands for them, one a line, lettered from A; the target is the letter. A
    list's target is a letter, a position from 0 or an option, a column's an option."""
    chat_template: bool | str = False
    """True renders through the tokenizer's chat template; a text with braces, or a file, is a separate template."""
    system_prompt: str | None = None
    """The system message before the prompt."""
    chat_options: dict[str, Any] | None = None
    """Additional arguments of the chat template, such as enable_thinking."""
    images_field: str | None = None
    """Column of the prompt's images: a list of files, bytes or what `datasets` makes of them. They come where the
    prompt says `<image>`, or else before its text."""

    def _check(self) -> None:
        # One origin of rows; each of several sources is checked as a separate section.
        if [self.path, self.task, self.sources].count(None) != 2:
            raise ValueError(
                "set exactly one of dataset.path (file, directory or hub id), dataset.task and dataset.sources"
            )
        for number, source in enumerate(self.sources or ()):
            location = f"dataset.sources[{number}]"
            if "sources" in source:
                raise ValueError(f"{location}: nested sources are not supported: list them at the top level")
            build(type(self), {name: value for name, value in source.items() if name != "weight"}, location)

    def limit(self, key: str, limit: int, message: str) -> None:
        """Set the setting `key` to `limit` if it is null.

        Raises:
            ConfigError: it is larger than `limit`, here or in a source; the text is `message`.
        """
        # Null becomes the limit; a source may only lower it.
        if getattr(self, key) is None:
            setattr(self, key, limit)
        lengths = (getattr(self, key), *(source.get(key) or 0 for source in self.sources or ()))
        if max(lengths) > limit:
            raise ConfigError(message)

    def cap(self, key: str, limit: int) -> Self:
        """Return a copy in which the setting `key` is at most `limit`, also in every source that sets it."""
        length = getattr(self, key)
        capped = self.model_copy(update={key: limit if length is None else min(length, limit)})
        if self.sources is not None:
            capped.sources = [
                {**source, key: min(source[key], limit)} if source.get(key) else source for source in self.sources
            ]
        return capped

    def exported_template(self, tokenizer: Any) -> str | None:
        """Return the chat template for the tokenizer of a model that is trained on these rows, with the arguments that
        it was rendered with as defaults; None for the tokenizer's own, also if sources have several templates."""
        from .chat import ChatFormat

        sections = [{**self, **source} for source in self.sources or [{}]]
        templates = {
            ChatFormat(tokenizer, section["chat_template"] or True, section["chat_options"]).exported
            for section in sections
            if isinstance(section["chat_template"], str) or section["chat_options"]
        }
        return templates.pop() if len(templates) == 1 else None

    @property
    def files(self) -> list[str]:
        """Return the settings that may name local files: the paths and chat templates of this section and its
        sources."""
        sections = [{"path": self.path, "chat_template": self.chat_template}, *(self.sources or ())]
        values = [source.get(key) for key in ("path", "chat_template") for source in sections]
        return [name for name in values if isinstance(name, str)]

    @property
    def procedural(self) -> bool:
        """Return whether all rows come from procedural tasks, which have test splits."""
        if self.sources is not None:
            return self.path is None and not any(isinstance(source.get("path"), str) for source in self.sources)
        return self.task is not None


class DatasetConfig(RowsConfig):
    """Prompts with the targets that answers are compared with."""

    kind = "prompts"

    target_field: str | None = "answer"
    """Column of the target; the default also finds target, solution or ground_truth. null: prompts have no target."""
    target_pattern: str | None = None
    """Regular expression; its group 1, searched in the target, is the target."""
    target_required: bool | None = None
    """Whether a row without that column is an error; null: true, unless the reward does not take the target."""
    columns: list[str] | None = None
    """Columns that rewards and environments get besides prompt and target (`prompt.row`); null: those that the reward
    names, or all of them for an environment or a reward with `**kwargs`."""
    required_columns: list[str] = Field(default_factory=list)
    """Columns without which a row is an error; those that the reward requires need not be listed."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt; null: what the completion leaves of `training.seq_len` and of what generators take."""
    too_long: Literal["skip", "error"] = "skip"
    """Longer prompts are skipped and counted, or an error."""
    sampler: Any = None
    """Instead of the shuffled order, one that follows from what came of the rows before: curriculum, frontier, retire
    or package.module:Class, by name or as `{use: name, <settings>}` ([data.md](data.md)). Needs a recipe
    that samples groups, and stored rows."""


class SupervisedConfig(RowsConfig):
    """Whole rows, of the form that the first one has: conversations, prompts with answers, or plain text."""

    kind = "supervised"

    target_field: str | None = "answer"
    """Column of the answer to a prompt."""
    target_pattern: str | None = None
    """Regular expression; its group 1, searched in the answer, is the answer."""
    messages_field: str | None = None
    """Column of conversations; null finds messages or conversations."""
    text_field: str | None = None
    """Column of plain text, all of which is trained."""
    train_on: Literal["assistant", "last"] = "assistant"
    """The trained turns of a conversation: all of the assistant, or the last."""
    thoughts: Literal["keep", "template"] = "keep"
    """Of earlier turns of a conversation, where the chat template omits them: `keep` trains each turn as it was
    when it was the last; with `template` such a conversation is an error, except with `train_on: last`."""
    epochs: PositiveInt | None = None
    """Passes over the data, after which the run ends, if `training.steps` is more; the last batch has the remaining
    rows. Null: endless. Not for streamed rows, whose number is unknown."""
    max_tokens: PositiveInt | None = None
    """Longest row; null: `training.seq_len`, or what the model takes if that is less."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """Longer rows are skipped and counted, cut, or an error."""

    def _check(self) -> None:
        super()._check()
        if self.text_field is not None and self.messages_field is not None:
            raise ValueError("dataset.text_field and dataset.messages_field exclude each other: set one of them")


class PreferencesConfig(RowsConfig):
    """Pairs: a prompt with two answers, two conversations, two texts that start alike, or a task, which makes the wrong
    answer itself."""

    kind = "preferences"

    chosen_field: str = "chosen"
    """Column of the preferred answer; pairs of equal answers are skipped and counted."""
    rejected_field: str = "rejected"
    """Column of the rejected answer."""
    thoughts: Literal["keep", "template"] = "keep"
    """Of earlier turns of a conversation, where the chat template omits them: `keep` trains each turn as it was
    when it was the last; with `template` such a conversation is an error."""
    epochs: PositiveInt | None = None
    """Passes over the data, after which the run ends, if `training.steps` is more; the last batch has the remaining
    rows. Null: endless. Not for streamed rows, whose number is unknown."""
    max_tokens: PositiveInt | None = None
    """Maximum tokens of the longer of a pair; null: half of `training.seq_len`, for both must fit, or the model's limit
    if that is less."""
    too_long: Literal["skip", "error"] = "skip"
    """Longer pairs are skipped and counted, or an error."""
