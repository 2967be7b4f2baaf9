"""The plain forward pass: transformers' own model with eager attention in float32, which engine and trainer are held
to, and the same with one thing changed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from forge.models.architecture import attention_kinds

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
    def shifted(self, distance: int) -> np.ndarray:
        """For each compared token the log-probability of the one that is `distance` after it, NaN where there is none
        or where it is not a sampled one."""
        ids, _ = self._inputs(None)
        out = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        rows = []
        for sequence, states, places in zip(self.run.sequences, out, self.places, strict=True):
            targets = places + distance
            inside = (targets > 0) & (targets < len(sequence.tokens)) & np.isin(targets, places)
            values = np.full(len(places), np.nan, np.float32)
            labels = torch.from_numpy(sequence.tokens[targets[inside]])
            logits = self.model.lm_head(states[targets[inside] - 1]).float() / self.run.temperature
            values[inside] = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].numpy()
            rows.append(values)
        return np.concatenate(rows)

    @contextmanager
    def seeing(self, sees: Callable[[Tensor, Tensor, int | None], Tensor]) -> Iterator[None]:
        """Another mask of attention in every layer.

        Args:
            sees: whether a query (positions [longest, 1]) sees a key ([1, longest]), by the layer's window.
        """
        handles = []
        for layer, kind in zip(self.model.model.layers, attention_kinds(self.model.config), strict=True):

            def replace(module: object, args: Any, kwargs: Any, window: int | None = kind.window) -> Any:
                positions = torch.arange(kwargs["hidden_states"].shape[1])
                visible = sees(positions[:, None], positions[None], window)
                bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
                return args, {**kwargs, "attention_mask": bias[None, None]}

            handles.append(layer.self_attn.register_forward_pre_hook(replace, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def with_attribute(self, name: str, change: Callable[[Any], Any]) -> Iterator[bool]:
        """Another value for an attribute of every module that has it; yields whether one has."""
        # Among attributes and buffers alike: Gemma's scale of the embedding is a buffer.
        owners = [module for module in self.model.modules() if name in vars(module) or name in module._buffers]
        before = [getattr(module, name) for module in owners]
        for module, value in zip(owners, before, strict=True):
            setattr(module, name, change(value))
        try:
            yield bool(owners)
        finally:
            for module, value in zip(owners, before, strict=True):
                setattr(module, name, value)

    @contextmanager
    def with_rotary(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
        """Other parameters of the rotary embedding; of a model with several kinds of all of them."""
        backbone = self.model.model
        before = backbone.rotary_emb
        config = copy.deepcopy(self.model.config)
        rope = config.rope_parameters
        nested = any(isinstance(value, dict) for value in rope.values())
        config.rope_parameters = {key: change(value) for key, value in rope.items()} if nested else change(rope)
        backbone.rotary_emb = type(before)(config=config)
        try:
            yield
        finally:
            backbone.rotary_emb = before

    def side(self) -> Side:
        """The unchanged computation with the states of its layers."""
        _, places = self._inputs(None)
        with traced(self.model) as (states, attended):
            logprobs = self.logprobs()
        return Side(logprobs, [self._read(x, places) for x in states], [self._read(x, places) for x in attended])

    @torch.no_grad()
    def over(self, older: Tensors, block: int = 1) -> np.ndarray:
        """Log-probabilities where the tokens before the last of the context, as far as they fill blocks, have keys and
        values of older weights."""
        rows = []
        for sequence, places in zip(self.run.sequences, self.places, strict=True):
            ids = torch.from_numpy(sequence.tokens)[None]
            first = (sequence.context - 1) // block * block
            cache_arguments: dict[str, Any] = {self._cache_argument: DynamicCache(), "use_cache": True}
            if first:
                self.set(older)
                self.model.model(input_ids=ids[:, :first], **cache_arguments)
                self.set(self.tensors)
            out = self.model.model(input_ids=ids[:, first:], **cache_arguments).last_hidden_state
            rows.append(out[0, places - 1 - first])
        return self.logprobs(self.logits(torch.cat(rows)))

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
