"""Log-probabilities of one batch by engine, transformers and trainer, in several ways, with the states of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.engines.cache import WIDTH, rounded
from forge.engines.decoder import Decoder
from forge.engines.weights import Layer, Weights, load_config
from forge.training.distributed import Ranks
from forge.training.policy import Policy, rank_tokens

from .recorded import RecordedRun, trainer_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")
CONTEXTS = 64  # contexts that are computed at once without a cache


@dataclass
class Side:
    """One way to compute the batch.

    logprobs: [compared] in nats. states: [compared, dim] where a token is predicted from, of the embedding and after
    each layer; attended: what each layer's attention hands to its output projection.
    """

    logprobs: np.ndarray
    states: list[Tensor]
    attended: list[Tensor]


class TracedDecoder(Decoder):
    """The engine's decoder, which records the states of each decoding step."""

    states: list[Tensor]
    attended: list[Tensor]

    def _embed(self, tokens: Tensor) -> Tensor:
        x = super()._embed(tokens)
        self.states = [x.float().clone()]
        self.attended = []
        return x

    def _finish_layer(self, layer: Layer, x: Tensor, attended: Tensor, choices: list[Tensor]) -> None:
        self.attended.append(attended.float().clone())
        super()._finish_layer(layer, x, attended, choices)
        self.states.append(x.float().clone())


class EngineSide:
    """The embedded engine with one version of the weights, on a CPU.

    Args:
        dtype: of weights and cache.
    """

    def __init__(self, run: RecordedRun, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.run, self.dtype = run, dtype
        self.config = load_config(run.start)
        self.weights = Weights(self.config, tensors.items(), dtype, CPU, run.version)

    def cached(self) -> Side:
        """Decode token by token with the cache, all sequences at once, as the engine does."""
        sequences = self.run.sequences
        decoded = self._decode([(sequence.tokens.tolist(), sequence.context) for sequence in sequences])
        kept = [sequence.mask[sequence.context :] for sequence in sequences]
        return self._side(
            [
                record
                for row, mask in zip(decoded, kept, strict=True)
                for record, is_kept in zip(row, mask, strict=True)
                if is_kept
            ]
        )

    def uncached(self) -> Side:
        """Compute each whole context by itself: no key or value is older than the token that it is read for."""
        rows = [
            (sequence.tokens[: position + 1].tolist(), int(position))
            for sequence in self.run.sequences
            for position in np.flatnonzero(sequence.mask)
        ]
        parts = [self._decode(rows[first : first + CONTEXTS]) for first in range(0, len(rows), CONTEXTS)]
        return self._side([record for part in parts for (record,) in part])

    @torch.inference_mode()
    def _decode(self, rows: Sequence[tuple[list[int], int]]) -> list[list[tuple[Tensor, ...]]]:
        """Logits, states and attention's outputs for each token of each row from a position on: what is before it is
        prefilled, and the rest decoded."""
        longest = max(len(tokens) for tokens, _ in rows)
        decoder = TracedDecoder(self.config, self.weights, rounded(len(rows), WIDTH), longest, self.dtype, CPU)
        decoder.cache.reserve(longest, 0)
        filled = [row for row, (_, first) in enumerate(rows) if first > 1]
        if filled:
            decoder.prefill([rows[row][0][: rows[row][1] - 1] for row in filled], filled)
        idle = [0] * (rounded(len(rows), WIDTH) - len(rows))
        records: list[list[tuple[Tensor, ...]]] = [[] for _ in rows]
        for step in range(max(len(tokens) - first for tokens, first in rows)):
            # A sequence that has ended decodes its last token again, which changes nothing.
            places = [min(first - 1 + step, len(tokens) - 2) for tokens, first in rows]
            inputs = [tokens[place] for (tokens, _), place in zip(rows, places, strict=True)]
            length = min(rounded(max(places) + 1, decoder.granule), decoder.cache.longest)
            decoder.cache.reserve(length, len(rows))
            logits = decoder.decode(torch.tensor(inputs + idle), torch.tensor(places + idle), length)
            record = logits.float(), torch.stack(decoder.states, 1), torch.stack(decoder.attended, 1)
            for row, (_, first) in enumerate(rows):
                if places[row] == first - 1 + step:
                    records[row].append(tuple(part[row] for part in record))
        return records

    def _side(self, records: Sequence[tuple[Tensor, ...]]) -> Side:
        logits, states, attended = (torch.stack(parts) for parts in zip(*records, strict=True))
        return Side(_logprobs(self.run, logits), list(states.unbind(1)), list(attended.unbind(1)))


class PlainSide:
    """Transformers' own model with eager attention in float32, which shares neither the cache, the attention nor the
    products of engine and trainer."""

    def __init__(self, run: RecordedRun, tensors: Mapping[str, Tensor]) -> None:
        self.run = run
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            run.start, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
        )
        self.model.requires_grad_(False).eval()
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)

    @torch.no_grad()
    def side(self, dtype: torch.dtype = torch.float32) -> Side:
        """All sequences in one pass, padded on the right: causal attention hides that from all that comes before.

        Args:
            dtype: of the products.
        """
        sequences = self.run.sequences
        longest = max(len(sequence.tokens) for sequence in sequences)
        ids = torch.tensor([[*sequence.tokens, *[0] * (longest - len(sequence.tokens))] for sequence in sequences])

        def read(values: Tensor) -> Tensor:
            """The values that compared tokens are predicted from."""
            parts = [row[np.flatnonzero(s.mask) - 1] for row, s in zip(values, sequences, strict=True)]
            return torch.cat(parts).float()

        with traced(self.model) as (states, attended), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(read(hidden)).float()
        return Side(_logprobs(self.run, logits), [read(x) for x in states], [read(x) for x in attended])


class TrainerSide:
    """The trainer's model in one process."""

    def __init__(self, run: RecordedRun, policy: Policy) -> None:
        self.run, self.policy = run, policy

    def unpacked(self) -> Side:
        """Each sequence in a pass by itself."""
        sides = [self._pass(number, number + 1) for number in range(len(self.run.sequences))]
        return Side(
            np.concatenate([side.logprobs for side in sides]),
            [torch.cat(parts) for parts in zip(*(side.states for side in sides), strict=True)],
            [torch.cat(parts) for parts in zip(*(side.attended for side in sides), strict=True)],
        )

    def packed(self, dtype: torch.dtype = torch.float32) -> Side:
        """All sequences in one pass, with a prompt that several share computed once."""
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return self._pass(0, len(self.run.sequences))

    @torch.no_grad()
    def _pass(self, first: int, end: int) -> Side:
        batch = trainer_batch(self.run.sequences[first:end])
        # The order of the states that are read is that of the tokens which they predict.
        read = rank_tokens(batch, 1, self.policy.ranks or Ranks(0, 1, CPU, None)).state_indices
        with traced(self.policy.model) as (states, attended):
            scores = self.policy(batch, self.run.temperature)
        return Side(
            scores.logprobs.float().numpy(),
            [x[0][read].float() for x in states],
            [x[0][read].float() for x in attended],
        )


@contextmanager
def traced(model: PreTrainedModel) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Collect the output of the embedding and of each layer, and the input of each attention's output projection, by
    forward hooks; all [rows, tokens, dim]."""
    backbone: Any = model.model
    states: list[Tensor] = []
    attended: list[Tensor] = []

    def keep_output(module: object, inputs: object, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    def keep_input(module: object, inputs: Any) -> None:
        attended.append(inputs[0].detach().clone())

    handles = [backbone.embed_tokens.register_forward_hook(keep_output)]
    for layer in backbone.layers:
        handles.append(layer.register_forward_hook(keep_output))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(keep_input))
    try:
        yield states, attended
    finally:
        for handle in handles:
            handle.remove()


def _logprobs(run: RecordedRun, logits: Tensor) -> np.ndarray:
    labels = torch.from_numpy(run.flat("tokens"))[:, None]
    return (logits / run.temperature).log_softmax(-1).gather(1, labels)[:, 0].numpy()
