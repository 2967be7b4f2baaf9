"""Batched forward passes of transformers' models, for reward models and process reward models."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from forge.data.prompts import PromptFormat
from forge.data.special_tokens import SpecialTokens
from forge.rewards.verifier import Unscored
from forge.types import Conversation

from .config import ModelSettings
from .threads import Batcher

A = TypeVar("A")

NO_LIMIT = 1 << 20  # tokens; tokenizers that have no limit state a huge number

Inputs = dict[str, Tensor]  # a model's inputs, [rows, width], padded on the right: input_ids, attention_mask, ...


class TokenRow(NamedTuple):
    """The token ids of a text, and its token type ids if the tokenizer has them."""

    ids: list[int]
    types: list[int] | None = None


class BatchedModel:
    """A model and its tokenizer, which reads rows of tokens in batches.

    Args:
        settings: the model's folder or hub id, device and dtype, and how prompts are rendered.
        loader: the class of transformers that loads it, such as AutoModelForSequenceClassification.

    Attributes:
        max_tokens: the most tokens of a row.

    Raises:
        ValueError: weights are missing, or the prompt template has other fields than {question}.
        OSError: there is no such model.
    """

    def __init__(self, settings: ModelSettings, loader: Any) -> None:
        path, max_tokens = str(settings.path), settings.max_tokens
        self.device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model, loading_info = loader.from_pretrained(
            path,
            dtype=getattr(torch, settings.dtype),
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        if missing := sorted(loading_info["missing_keys"]):
            raise ValueError(f"{path} has missing weights of {type(model).__name__}, such as {missing[0]!r}")
        self.model: PreTrainedModel = model.eval().requires_grad_(False).to(self.device)

        self.batch_tokens = settings.batch_tokens
        self.format = PromptFormat(
            self.tokenizer,
            **{name: settings[name] for name in ("prompt_template", "chat_template", "system_prompt", "chat_options")},
        )
        self.format.fields(["question"])  # raises the error of an invalid template now, not at the first score
        self.special = SpecialTokens(self.tokenizer)

        # `max_tokens` is the least of three limits: the tokenizer's, the model's and the setting.
        positions = getattr(self.model.config, "max_position_embeddings", None)
        for name, module in self.model.named_modules():
            padding = getattr(module, "padding_idx", None)
            if positions and padding is not None and name.rpartition(".")[2] == "position_embeddings":
                positions -= padding + 1  # RoBERTa's positions start after the padding index
                break

        limits = (self.tokenizer.model_max_length, positions)
        finite_limits = [limit for limit in limits if limit and limit < NO_LIMIT]
        self.max_tokens = min(*finite_limits, max_tokens or NO_LIMIT, NO_LIMIT)
        pad_ids = (self.model.config.get_text_config().pad_token_id, self.tokenizer.pad_token_id, 0)
        self._pad = next(pad for pad in pad_ids if pad is not None and pad >= 0)  # some configurations have -1

    def row_of(self, prompt: str) -> Mapping[str, Any]:
        """Return a prompt as a row that this model's format reads: with its messages, tools and arguments of the
        template where a chat template writes them, else as text."""
        conversation = Conversation(prompt)
        question = conversation.row["question"]
        if self.format.chat is not None or (isinstance(question, list) and self.tokenizer.chat_template):
            return conversation.row
        return {"question": question if isinstance(question, str) else conversation.plain}

    def encode(self, prompt: str, response: str) -> TokenRow:
        """Return the tokens of the rendered prompt with the response; with a chat template, those of the rendered
        conversation of both.

        Raises:
            ValueError: the template cannot render them.
        """
        row = self.row_of(prompt)
        if (dialogue := self.format.dialogue(row)) is None:
            text = self.format.render(row)[0] + response
        else:
            messages, chat = dialogue
            text = chat.render([*messages, {"role": "assistant", "content": response}])
        encoded: Any = self.tokenizer([text], add_special_tokens=dialogue is None)
        return TokenRow(encoded["input_ids"][0], encoded.get("token_type_ids", [None])[0])

    def class_index(self, label: str | int | None) -> int:
        """Return the index of a model class, given by name or number; None for the only class.

        Args:
            label: its name or index; None: the model has only one class.

        Raises:
            ValueError: there is no such class, or `label` is None and the model has several classes.
        """
        names = {int(number): name for number, name in (self.model.config.id2label or {}).items()}
        listed = ", ".join(f"{name!r}" for name in names.values())
        if label is None:
            if len(names) > 1:
                raise ValueError(f"the model has {len(names)} classes: set label to one of {listed}")
            return 0
        for number, name in names.items():
            if label in (name, number):
                return number
        raise ValueError(f"label must be a class of the model ({listed}), got {label!r}")

    @torch.inference_mode()
    def stream(
        self, rows: Sequence[TokenRow | Exception], read: Callable[[Inputs], Sequence[A]]
    ) -> Iterator[tuple[int, A | Exception]]:
        """Yield (index of the row, outcome) for each row, batch by batch.

        Args:
            rows: rows of tokens, or the errors in making them, which are yielded as outcomes.
            read: returns the outcome of each row of a batch. Rows that are empty or too long are not read, and have
                Unscored as the outcome.
        """
        readable: dict[int, TokenRow] = {}
        for index, row in enumerate(rows):
            if isinstance(row, Exception):
                yield index, row
            elif not row.ids:
                yield index, Unscored("there are no tokens to read")
            elif len(row.ids) > self.max_tokens:
                yield index, Unscored(f"it has {len(row.ids)} tokens, and the model reads {self.max_tokens}")
            else:
                readable[index] = row

        # Rows of similar length in batches, each with at most `batch_tokens` tokens when padded to its longest row.
        batches: list[list[int]] = []
        for index in sorted(readable, key=lambda index: len(readable[index].ids)):
            if not batches or (len(batches[-1]) + 1) * len(readable[index].ids) > self.batch_tokens:
                batches.append([])
            batches[-1].append(index)

        for batch in batches:
            yield from zip(batch, read(self.pad([readable[index] for index in batch])), strict=True)

    def pad(self, rows: Sequence[TokenRow]) -> Inputs:
        """Return rows as a batch of inputs, padded on the right, where the attention mask hides the padding."""
        columns = {"input_ids": [row.ids for row in rows], "attention_mask": [[1] * len(row.ids) for row in rows]}
        if rows[0].types is not None:
            columns["token_type_ids"] = [row.types or [] for row in rows]
        fill = {"input_ids": self._pad}
        return {
            name: pad_sequence([torch.tensor(values) for values in column], True, fill.get(name, 0)).to(self.device)
            for name, column in columns.items()
        }


class ModelVerifier(ABC, Generic[A]):
    """A verifier whose model reads one row of tokens for each response, in batches, in a separate thread.

    Within a `Panel`, whose timeout must be longer than one forward pass, each response that is read counts as progress.

    Args:
        settings, loader: the model, as for `BatchedModel`.
        name: a part of the thread's name.
    """

    def __init__(self, settings: ModelSettings, loader: Any, name: str) -> None:
        self.model = BatchedModel(settings, loader)
        self._batcher: Batcher[tuple[str, str], A | Exception] = Batcher(self._compute_scores, name)

    @property
    def progress(self) -> int:
        """Return the number of responses that have been read."""
        return self._batcher.progress

    @abstractmethod
    def row(self, prompt: str, response: str) -> TokenRow:
        """Return the tokens that the model reads for a response; any error leaves the response unscored."""

    @abstractmethod
    def outcomes(self, inputs: Inputs) -> list[A]:
        """Return the model's outcome for each row of a batch."""

    async def read(self, prompt: str, responses: Sequence[str]) -> list[A | Exception]:
        """Return the model's outcome for each response, or the error that leaves it unscored."""
        return await self._batcher([(prompt, response) for response in responses])

    async def close(self) -> None:
        """Stop the thread, so that waiting calls fail."""
        self._batcher.close()

    def _compute_scores(self, texts: list[tuple[str, str]]) -> Iterator[tuple[int, A | Exception]]:
        rows: list[TokenRow | Exception] = []
        for prompt, response in texts:
            try:
                rows.append(self.row(prompt, response))
            except Exception as error:
                rows.append(error)
        return self.model.stream(rows, self.outcomes)
