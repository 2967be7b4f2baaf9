"""Rows that transformers computes separately, for models whose attention or cache the engine's cannot replace."""

import copy
from collections.abc import Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from forge.engines.cache import KeyValueCache
from forge.engines.decoder import Decoder
from forge.models.architecture import FAMILIES

from .images import forbid_images, prepare_images
from .sizes import token_bytes
from .weights import ModuleWeights, Template


class Sample:
    """The tokens of a row that were computed, and the arguments of the next forward pass, transformers' cache included.

    Attributes:
        arguments: {} before the first forward pass, and for a model without a cache.
        images: of its prompt.
    """

    def __init__(self, images: tuple[bytes, ...] = ()) -> None:
        self.tokens: list[int] = []
        self.arguments: dict[str, Any] = {}
        self.images = images

    def clone(self) -> "Sample":
        """Return a copy of the sample that shares no memory with it."""
        return copy.deepcopy(self)


class SampleCache(KeyValueCache):
    """Cache of the computed samples of an engine's rows, with whole samples instead of keys and values."""

    def __init__(self, config: PreTrainedConfig, **options: Any) -> None:
        """Make a cache whose memory is that of transformers' caches for a model of this config."""
        sizes = dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "head_dim", "num_attention_heads"), 1)
        super().__init__(SimpleNamespace(model_type=FAMILIES[0], **sizes), **options)  # type: ignore[arg-type]
        self.token_bytes = token_bytes(config, options["dtype"])
        self.samples: dict[int, Sample] = {}

    def reserve(self, length: int, rows: int, max_length: int | None = None) -> None:
        """Drop the samples of rows from number `rows` on, which do not run."""
        self.samples = {row: sample for row, sample in self.samples.items() if row < rows or row == self.prefill_row}

    def resize(self, size: int, rows: int) -> None:
        """Keep all samples: they have as much memory as they need."""

    def clear(self) -> None:
        """Drop all samples."""
        self.samples.clear()

    def erase(self, row: int, start: int = 0) -> None:
        """Drop the sample of a row, except one that is computed in pieces."""
        if start == 0:
            self.samples.pop(row, None)

    def read(self, row: int, length: int) -> tuple[Any, ...]:
        """Return the computed sample of a row."""
        return (self.samples.get(row, Sample()),)

    def fill(self, rows: Sequence[int], parts: Sequence[tuple[Any, ...]]) -> None:
        """Copy the last one of results of `read` to each of `rows`."""
        for row in rows if parts else ():
            self.samples[row] = parts[-1][0].clone()


class SampleDecoder(Decoder):
    """A `Decoder` of any causal model of transformers: one forward pass for each row, so that its bits depend on no
    other row.

    Args:
        has_cache: whether transformers' cache of a sample gives what its forward pass of all tokens gives; without it
            each token costs a forward pass of all tokens before it.
    """

    weights: ModuleWeights  # type: ignore[assignment]
    cache: SampleCache
    has_prefixes = False
    takes_images = True

    def __init__(
        self,
        template: Template,
        config: PreTrainedConfig,
        weights: ModuleWeights,
        rows: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        record: bool = False,
        cache_bytes: int | None = None,
        granule: int = 16,
        has_cache: bool = True,
    ):
        self.weights = weights
        self.device = device
        self.vocab = template.vocab
        self.granule = granule
        self.has_cache = has_cache
        self.max_seq_len = max_seq_len
        self.row_ids = torch.arange(rows, device=device)
        self.cache = SampleCache(
            config, rows=rows, max_seq_len=max_seq_len, dtype=dtype, device=device, limit=cache_bytes
        )

    def decode(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Run one token of each of the first B rows, as `Decoder.decode`; rows that do not run have zeros."""
        logits = torch.zeros(len(tokens), self.vocab, device=self.device)
        for row, (token, position) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            if position == 0:  # a prompt of one token, which has no prefill
                self.cache.samples[row] = Sample()
            if row in self.cache.samples:
                logits[row] = self._run_tokens(self.cache.samples[row], [token])
        return forbid_images(logits, self.weights.model.config)

    def prefill(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int] = (), images: Any = ()
    ) -> None:
        """Compute each prompt's tokens for its row, as `Decoder.prefill`."""
        requests = zip(prompts, rows, starts or [0] * len(prompts), images or [()] * len(prompts), strict=True)
        for prompt, row, start, pictures in requests:
            earlier = self.cache.samples[row].tokens if start else []
            sample = self.cache.samples[row] = Sample(pictures)
            # A piece may have a part of an image only: the first step computes all tokens.
            if pictures and row == self.cache.prefill_row:
                sample.tokens = [*earlier, *prompt]
            else:
                self._run_tokens(sample, [*earlier, *prompt])

    def _run_tokens(self, sample: Sample, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a sample; return the logits (V,) after the last one, in float32."""
        sample.tokens += tokens
        model: Any = self.weights.model
        input_ids = torch.tensor([sample.tokens], device=self.device)
        is_first = not sample.arguments
        pictures = prepare_images(model, [sample.images], input_ids) if is_first else {}
        if not self.has_cache:
            return model(input_ids=input_ids, use_cache=False, **pictures).logits[0, -1].float()  # type: ignore[no-any-return]

        # The steps of transformers' `generate`, for whatever cache the model has.
        if is_first:
            sample.arguments = {"use_cache": True, "attention_mask": torch.ones_like(input_ids), **pictures}
            model._prepare_cache_for_generation(GenerationConfig(), sample.arguments, None, 1, self.max_seq_len)
            if "position_ids" in signature(model.forward).parameters and not model.config.is_encoder_decoder:
                sample.arguments["position_ids"] = model._prepare_position_ids_for_generation(
                    input_ids, sample.arguments
                )
        inputs = model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=None if is_first else len(tokens),
            is_first_iteration=is_first,
            **sample.arguments,
        )
        output = model(**inputs, return_dict=True)
        sample.arguments = model._update_model_kwargs_for_generation(output, sample.arguments)
        sample.arguments.pop("pixel_values", None)  # which the copies of a sample would repeat
        return output.logits[0, -1].float()  # type: ignore[no-any-return]
