"""The plain forward pass: transformers' own model with eager attention in float32, which engine and trainer are held
to, and the same with one thing changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .recorded import RecordedRun
from .sides import Side, traced
from .weights import Tensors, Version


class Plain:
    """The reference computation of a run's batch under one version's weights.

    It shares neither the cache, the attention nor the products of engine and trainer. What a method changes is undone
    when its context ends.
    """

    def __init__(self, run: RecordedRun, version: Version) -> None:
        self.run = run
        self.number = version.number
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            run.start, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
        )
        self.model.requires_grad_(False).eval()
        self.tensors = version.tensors
        # Releases before 5.20 or so know the cache by its former name alone.
        parameters = inspect.signature(inspect.unwrap(type(self.model.model).forward)).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.tied: bool = self.model.config.tie_word_embeddings
        self.set(self.tensors)
        self.contexts = [sequence.tokens[: sequence.context].tolist() for sequence in run.sequences]
        self.places = [np.flatnonzero(sequence.mask) for sequence in run.sequences]
        self.labels = torch.from_numpy(run.flat("tokens"))

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return len(self.model.model.layers)

    @torch.no_grad()
    def set(self, tensors: Tensors) -> None:
        """Take other weights, in place."""
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)

    @contextmanager
    def with_tensors(self, changes: Tensors) -> Iterator[None]:
        """Other weights for some names; a head that is tied to the embedding is untied if it is named alone."""
        if self.tied and "lm_head.weight" in changes:
            head = self.model.lm_head.weight
            self.model.lm_head.weight = nn.Parameter(changes["lm_head.weight"].clone(), requires_grad=False)
            try:
                yield
            finally:
                self.model.lm_head.weight = head
            return
        self.set(changes)
        try:
            yield
        finally:
            self.set({name: self.tensors[name] for name in changes})

    @torch.no_grad()
    def hidden(self, contexts: Sequence[Sequence[int]] | None = None, shift: int = 0) -> Tensor:
        """The last states that the compared tokens are predicted from, [compared, dim].

        Args:
            contexts: other tokens before the first sampled one of each sequence.
            shift: read the state so many tokens later.
        """
        ids, places = self._inputs(contexts)
        # Padding is on the right: causal attention hides it from all that comes before.
        out = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return self._read(out, [np.maximum(row_places + shift, 1) for row_places in places])

    @torch.no_grad()
    def logits(self, hidden: Tensor | None = None, **changes: Any) -> Tensor:
        """The logits of the compared tokens, [compared, vocabulary]; arguments are those of `hidden`."""
        return self.model.lm_head(self.hidden(**changes) if hidden is None else hidden).float()

    def logprobs(self, logits: Tensor | None = None, temperature: float | None = None, **changes: Any) -> np.ndarray:
        """The log-probabilities of the compared tokens, [compared]; arguments are those of `hidden`."""
        logits = self.logits(**changes) if logits is None else logits
        scaled = logits / (self.run.temperature if temperature is None else temperature)
        return scaled.log_softmax(-1).gather(1, self.labels[:, None])[:, 0].numpy()

    @torch.no_grad()
    def side(self) -> Side:
        """The unchanged computation with the states of its layers."""
        _, places = self._inputs(None)
        with traced(self.model) as (states, attended):
            logprobs = self.logprobs()
        return Side(logprobs, [self._read(x, places) for x in states], [self._read(x, places) for x in attended])

    @torch.no_grad()
    def _inputs(self, contexts: Sequence[Sequence[int]] | None) -> tuple[Tensor, list[np.ndarray]]:
        """Token ids [sequences, longest], padded on the right, and the places of the compared tokens in each row."""
        first_contexts = self.contexts if contexts is None else contexts
        rows = [
            [*context, *sequence.tokens[sequence.context :].tolist()]
            for context, sequence in zip(first_contexts, self.run.sequences, strict=True)
        ]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        shifts = [len(context) - len(before) for context, before in zip(first_contexts, self.contexts, strict=True)]
        return ids, [places + shift for places, shift in zip(self.places, shifts, strict=True)]

    @staticmethod
    def _read(values: Tensor, places: Sequence[np.ndarray]) -> Tensor:
        return torch.cat([row[row_places - 1] for row, row_places in zip(values, places, strict=True)]).float()


def rounded_logprobs(plain: Plain) -> np.ndarray:
    """Compute log-probabilities with all products in bfloat16, [compared]: what rounding alone changes."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = plain.hidden().bfloat16()
        return plain.logprobs(plain.logits(hidden))
