"""A transformers model that reads rows of tokens in batches: what reward models and process reward models share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..data.prompts import PromptFormat
from .spec import ModelSettings
from .verifier import Unscored

NO_LIMIT = 1 << 20  # tokenizers without a limit say a number beyond all use


class Row(NamedTuple):
    """Tokens of a text, and where the tokenizer tells two texts apart, to which of them each belongs."""

    ids: list[int]
    types: list[int] | None = None


class Padded(NamedTuple):
    """Rows padded at the right. inputs: of the model; lengths: [rows]."""

    inputs: dict[str, Tensor]
    lengths: Tensor


class BatchedModel:
    """A model and its tokenizer, from a folder or hub id.

    Args:
        settings: its path and how it is held.
        loader: a class of transformers, such as AutoModelForSequenceClassification.

    Raises:
        ValueError: weights that the folder lacks. OSError: no such model.
    """

    def __init__(self, settings: ModelSettings, loader: Any) -> None:
        path, max_tokens = str(settings.path), settings.max_tokens
        self.device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        model, found = loader.from_pretrained(path, dtype=getattr(torch, settings.dtype), output_loading_info=True)
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"{path} lacks weights of {type(model).__name__}, {missing[0]!r} among them")
        self.model: PreTrainedModel = model.eval().requires_grad_(False).to(self.device)
        self.batch_tokens = settings.batch_tokens
        limits = (self.tokenizer.model_max_length, _positions(self.model))
        known = [limit for limit in limits if limit and limit < NO_LIMIT]
        self.max_tokens = min(*known, max_tokens or NO_LIMIT, NO_LIMIT)
        pads = (self.model.config.get_text_config().pad_token_id, self.tokenizer.pad_token_id, 0)
        self._pad = next(pad for pad in pads if pad is not None and pad >= 0)  # some configurations say -1

    @cached_property
    def identity(self) -> str:
        """Of weights, configuration and tokenizer; reads all of them."""
        digest = hashlib.sha256(self.model.config.to_json_string(use_diff=False).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        digest.update(words.encode())
        digest.update(repr((self.tokenizer.chat_template, self.tokenizer.special_tokens_map)).encode())
        return digest.hexdigest()[:32]

    def run(self, rows: Sequence[Row], read: Callable[[Padded], Sequence[Any]]) -> list[Any]:
        """What `read` says of each row, in order; an Unscored in place of it for a row that is empty or too long, and
        what `read` raises for a row that it cannot read even alone."""
        found = dict(self.stream(rows, read))
        return [found[index] for index in range(len(rows))]

    @torch.inference_mode()
    def stream(
        self,
        rows: Sequence[Row | Exception],
        read: Callable[[Padded], Sequence[Any]],
        wanted: Callable[[int], bool] = lambda index: True,
    ) -> Iterator[tuple[int, Any]]:
        """As `run`, of each row as soon as it is known, with its index; an exception is given back as it is. Rows are
        left out that are not wanted by the time of their batch."""
        fit: dict[int, Row] = {}
        for index, row in enumerate(rows):
            if isinstance(row, Exception):
                yield index, row
            elif not row.ids:
                yield index, Unscored("there are no tokens to read")
            elif len(row.ids) > self.max_tokens:
                yield index, Unscored(f"it has {len(row.ids)} tokens, and the model reads {self.max_tokens}")
            else:
                fit[index] = row
        # Batches of rows of about one length, of at most `batch_tokens` with their padding.
        batches: list[list[int]] = []
        for index in sorted(fit, key=lambda index: len(fit[index].ids)):
            if not batches or (len(batches[-1]) + 1) * len(fit[index].ids) > self.batch_tokens:
                batches.append([])
            batches[-1].append(index)
        for batch in batches:
            if indices := [index for index in batch if wanted(index)]:
                yield from zip(indices, self._read(indices, fit, read), strict=True)

    def _read(
        self, indices: list[int], rows: Mapping[int, Row], read: Callable[[Padded], Sequence[Any]]
    ) -> Sequence[Any]:
        try:
            return read(self.pad(indices, rows))
        except Exception as error:
            if len(indices) == 1:
                return [error]
        # In halves: it may be too much at once, or the fault of one row.
        half = len(indices) // 2
        return [*self._read(indices[:half], rows, read), *self._read(indices[half:], rows, read)]

    def pad(self, indices: list[int], rows: Sequence[Row] | Mapping[int, Row]) -> Padded:
        """These rows as one batch."""
        lengths = [len(rows[index].ids) for index in indices]
        width = max(lengths)
        ids, mask, types = [], [], []
        for row in (rows[index] for index in indices):
            gap = [0] * (width - len(row.ids))
            ids.append(row.ids + [self._pad] * len(gap))
            mask.append([1] * len(row.ids) + gap)
            types.append((row.types or [0] * len(row.ids)) + gap)
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        if rows[indices[0]].types is not None:
            inputs["token_type_ids"] = torch.tensor(types)
        on_device = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        return Padded(on_device, torch.tensor(lengths, device=self.device))


def row_or_error(make: Callable[[str, str], Row], prompt: str, response: str) -> Row | Exception:
    """The row of the texts, or the exception that making it raises."""
    try:
        return make(prompt, response)
    except Exception as error:
        return error


def prompt_format(tokenizer: Any, settings: ModelSettings) -> PromptFormat:
    """Renders prompts as data sets do.

    Raises:
        ValueError: invalid settings, or a template with more than {question}.
    """
    names = ("prompt_template", "chat_template", "system_prompt", "chat_options")
    found = PromptFormat(tokenizer, **{name: settings[name] for name in names})
    found.fields(["question"])
    return found


def whole(how: PromptFormat, prompt: str, response: str) -> str:
    """Prompt and response; with a chat template the whole conversation. ValueError: the template cannot render it."""
    text = how.render({"question": prompt})[0]
    if how.chat is None:
        return text + response
    system = [{"role": "system", "content": how.system_prompt}] if how.system_prompt else []
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": response}]
    return how.chat.render([*system, *turns])


def _positions(model: PreTrainedModel) -> int | None:
    """Most tokens that it has positions for. Those of RoBERTa's kind come after the one of padding."""
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if limit and name.rpartition(".")[2] == "position_embeddings":
            padding = getattr(module, "padding_idx", None)
            return limit if padding is None else limit - padding - 1
    return limit


def class_of(model: Any, label: str | int | None) -> int:
    """The number of the class. ValueError: the model has no such class, or several and `label` is not set."""
    names = {int(number): name for number, name in model.config.id2label.items()}
    known = ", ".join(f"{name!r}" for name in names.values())
    if label is None:
        if len(names) > 1:
            raise ValueError(f"the model has {len(names)} classes: set label to one of {known}")
        return 0
    for number, name in names.items():
        if label in (name, number):
            return number
    raise ValueError(f"the model has no class {label!r}: it has {known}")
