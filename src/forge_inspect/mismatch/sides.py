"""Log-probabilities of one batch by the engine and by the trainer, each in several ways, with the states of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forge.engines.cache import WIDTH, rounded
from forge.engines.decoder import Decoder
from forge.engines.engine import EmbeddedEngine
from forge.engines.weights import Layer, Weights, load_config
from forge.training.distributed import Ranks
from forge.training.policy import rank_tokens
from forge.types import Batch, Sampling

from .recorded import RecordedRun, SampledTokens
from .weights import Tensors, Version

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")
CONTEXTS = 64  # contexts that are computed at once without a cache
FRESH_TOKENS = 32  # tokens of a completion that is sampled for the comparison


@dataclass
class Side:
    """One way to compute the batch.

    logprobs: [compared] in nats. states: [compared, dim] where a token is predicted from, of the embedding and after
    each layer; attended: what each layer's attention hands to its output projection. Both are empty unless traced.
    """

    logprobs: np.ndarray
    states: list[Tensor] = field(default_factory=list)
    attended: list[Tensor] = field(default_factory=list)


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
        folder: the model that the run began with, whose config.json the engine reads.
        dtype: of weights and cache.
    """

    def __init__(
        self, run: RecordedRun, folder: Path, tensors: Tensors, number: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.run, self.folder, self.number = run, folder, number
        self.tensors = tensors
        self.dtype = dtype
        self.config = load_config(folder)
        self.weights = Weights(self.config, tensors.items(), dtype, CPU, number)

    @torch.inference_mode()
    def cached(self, sequences: Sequence[SampledTokens] | None = None) -> Side:
        """Decode token by token with the cache, all sequences at once, as the engine does."""
        decoded_sequences = self.run.sequences if sequences is None else sequences
        longest = max(len(sequence.tokens) for sequence in decoded_sequences)
        decoder = self._decoder(rounded(len(decoded_sequences), WIDTH), longest)
        contexts = [sequence.tokens[: sequence.context - 1].tolist() for sequence in decoded_sequences]
        decoder.cache.reserve(longest, 0)
        filled = [row for row, context in enumerate(contexts) if context]
        if filled:
            decoder.prefill([contexts[row] for row in filled], filled)
        steps = max(len(sequence.tokens) - sequence.context for sequence in decoded_sequences)
        records: list[list[tuple[Tensor, ...]]] = [[] for _ in decoded_sequences]
        # A sequence that has ended decodes its last token again, which changes nothing.
        for step in range(steps):
            places = [min(s.context - 1 + step, len(s.tokens) - 2) for s in decoded_sequences]
            tokens = [int(s.tokens[position]) for s, position in zip(decoded_sequences, places, strict=True)]
            record = self._decode(decoder, tokens, places)
            for row, (sequence, position) in enumerate(zip(decoded_sequences, places, strict=True)):
                if position == sequence.context - 1 + step and sequence.mask[position + 1]:
                    records[row].append(tuple(part[row] for part in record))
        return self._side([record for row in records for record in row], decoded_sequences)

    @torch.inference_mode()
    def uncached(self) -> Side:
        """Compute each whole context by itself: no key or value is older than the token that it is read for."""
        contexts = [
            sequence.tokens[:position].tolist()
            for sequence in self.run.sequences
            for position in np.flatnonzero(sequence.mask)
        ]
        records: list[tuple[Tensor, ...]] = []
        for first in range(0, len(contexts), CONTEXTS):
            some = contexts[first : first + CONTEXTS]
            longest = max(map(len, some))
            decoder = self._decoder(rounded(len(some), WIDTH), longest)
            decoder.cache.reserve(longest, 0)
            filled = [row for row, context in enumerate(some) if len(context) > 1]
            if filled:
                decoder.prefill([some[row][:-1] for row in filled], filled)
            record = self._decode(decoder, [context[-1] for context in some], [len(context) - 1 for context in some])
            records += [tuple(part[row] for part in record) for row in range(len(some))]
        return self._side(records, self.run.sequences)

    def sampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Sample completions of the batch's contexts as the run does.

        Returns:
            the log-probabilities that the engine reports, and those that its decoder has of the same tokens; [sampled].
        """
        settings = self.run.settings
        fields = {name: settings.get(f"grpo.{name}") for name in ("top_p", "top_k", "repetition_penalty")}
        excluding = {name: value for name, value in fields.items() if value is not None}
        sampling = Sampling(temperature=self.run.temperature, max_tokens=FRESH_TOKENS, seed=0, **excluding)
        if sampling.restricted:
            sampling = Sampling(
                temperature=self.run.temperature, max_tokens=FRESH_TOKENS, seed=0, logprobs_of="policy", **excluding
            )
        longest = max(len(sequence.tokens) for sequence in self.run.sequences) + FRESH_TOKENS
        longest = min(longest, self.config.max_position_embeddings)
        name = str(self.dtype).removeprefix("torch.")
        slots = len(self.run.sequences)
        with EmbeddedEngine(self.folder, device=CPU, dtype=name, max_seq_len=longest, slots=slots) as engine:
            engine.update_weights(self.tensors.items(), self.number).result()
            contexts = [sequence.tokens[: sequence.context].tolist() for sequence in self.run.sequences]
            contexts = [context for context in contexts if len(context) < longest]
            futures = [engine.submit(context, sampling) for context in contexts]
            completions = [future.result()[0] for future in futures]
        fresh = []
        for completion in completions:
            tokens = np.array([*completion.prompt_ids, *completion.token_ids])
            mask = np.arange(len(tokens)) >= len(completion.prompt_ids)
            unknown = np.full(len(tokens), np.nan, np.float32)
            fresh.append(SampledTokens(tokens, mask, unknown, unknown, unknown, 0, ""))
        reported = np.concatenate([completion.logprobs for completion in completions])
        return reported, self.cached(fresh).logprobs

    def _decoder(self, rows: int, longest: int) -> TracedDecoder:
        return TracedDecoder(self.config, self.weights, rows, longest, self.dtype, CPU)

    def _decode(self, decoder: TracedDecoder, tokens: list[int], places: list[int]) -> tuple[Tensor, ...]:
        """Logits, states and attention's outputs of each row, all [rows, ...]."""
        count = rounded(len(tokens), WIDTH)
        idle = [0] * (count - len(tokens))
        length = min(rounded(max(places) + 1, decoder.granule), decoder.cache.longest)
        decoder.cache.reserve(length, len(tokens))
        logits = decoder.decode(torch.tensor(tokens + idle), torch.tensor(places + idle), length)
        return logits.float(), torch.stack(decoder.states, 1), torch.stack(decoder.attended, 1)

    def _side(self, records: Sequence[tuple[Tensor, ...]], sequences: Sequence[SampledTokens]) -> Side:
        logits, states, attended = (torch.stack(parts) for parts in zip(*records, strict=True))
        labels = torch.from_numpy(np.concatenate([sequence.tokens[sequence.mask] for sequence in sequences]))
        logprobs = (logits / self.run.temperature).log_softmax(-1).gather(1, labels[:, None])[:, 0]
        return Side(logprobs.numpy(), list(states.unbind(1)), list(attended.unbind(1)))


class TrainerSide:
    """The trainer's model in one process."""

    def __init__(self, run: RecordedRun, version: Version) -> None:
        self.run, self.policy = run, version.policy

    def unpacked(self) -> Side:
        """Each sequence in a pass by itself."""
        sides = [self._pass(self.run.batch([sequence])) for sequence in self.run.sequences]
        return Side(
            np.concatenate([side.logprobs for side in sides]),
            [torch.cat(parts) for parts in zip(*(side.states for side in sides), strict=True)],
            [torch.cat(parts) for parts in zip(*(side.attended for side in sides), strict=True)],
        )

    def packed(self, dtype: torch.dtype = torch.float32) -> Side:
        """All sequences in one pass, with a prompt that several share computed once."""
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return self._pass(self.run.batch())

    @torch.no_grad()
    def _pass(self, batch: Batch) -> Side:
        # The order of the states that are read is that of the tokens which they predict.
        read = rank_tokens(batch, 1, self.policy.ranks or Ranks(0, 1, CPU, None)).state_indices
        with traced(self.policy.model) as (states, attended):
            scores = self.policy(batch, self.run.temperature)
        return Side(
            scores.logprobs.float().numpy(),
            [state[0][read].float() for state in states],
            [state[0][read].float() for state in attended],
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
