"""Engine, transformers and trainer on one recorded batch, in a row: where neighbours part, and by how much."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.data.packing import pack
from forge.engines.cache import WIDTH, rounded
from forge.engines.decoder import Decoder
from forge.engines.weights import Layer, Weights, load_config
from forge.models.architecture import sparse_layers
from forge.models.tokenizer import model_config
from forge.training.distributed import Ranks
from forge.training.policy import Policy, rank_tokens
from forge.types import Episode

from .recorded import RecordedRun, open_run, read_policy

CPU = torch.device("cpu")
# Nats, mean over the tokens of the sequence that differs most. Between engine, trainer and transformers in float32 tiny
# models of seven families differ by at most 2.5e-6 on a CPU; larger ones add up more terms, and are not measured.
FLOAT32 = 1e-4
# Several times the noise of half precision, measured on the same batch: two kernels round differently.
HALF_TIMES = 3.0
# A share of the tokens of a mixture of experts may flip between experts that are almost tied.
FLIPPED = 0.02
# Relative to the norm of the states. In float32 states of engine, trainer and transformers differ by at most 8e-7 of it
# (tiny models), and one product that is rounded to bfloat16 moves them by 6e-4.
STATES = 2e-5

RECORDED, TRAINED = "recorded engine", "recorded trainer"
ENGINE, PLAIN, TRAINER = "engine now", "plain forward pass", "trainer now"
# By the second side of a pair.
COMPONENTS = {
    ENGINE: "the engine as it sampled",
    PLAIN: "the engine's forward pass",
    TRAINER: "the trainer's forward pass",
    TRAINED: "the trainer as it trained",
}
# Where what was recorded agrees, and nothing that is computed now does.
TOGETHER = "the saved weights, or the settings or the model of today"


@dataclass
class Side:
    """One way to compute the batch.

    logprobs: [compared] in nats. states: [compared, dim] where a token is predicted from, of the embedding and after
    each layer.
    """

    logprobs: np.ndarray
    states: list[Tensor]


@dataclass(frozen=True)
class Link:
    """Two neighbouring sides, and the component in which they differ.

    mean: of |difference| over all tokens, in nats. worst: the mean of the sequence in which it is largest, which is
    compared with the tolerance.
    """

    first: str
    second: str
    component: str
    mean: float
    worst: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the two differ by rounding alone."""
        return self.worst <= self.tolerance


@dataclass
class Mismatch:
    """The result of a comparison.

    component, part: of the first link that disagrees; the embedding or layer after which states begin to differ (with
    `bisect`). Empty texts: there is none.
    """

    run: str
    step: int
    version: int
    tokens: int
    links: list[Link] = field(default_factory=list)
    component: str = ""
    part: str = ""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether engine and trainer compute the same."""
        return not self.faults

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, for a page beside `train/engine_difference`."""
        if self.is_sound:
            return f"engine and trainer agree on {self.tokens} tokens of version {self.version}"
        return self.faults[0]

    def json(self) -> str:
        """The comparison as JSON."""
        links = [asdict(link) | {"agrees": link.agrees} for link in self.links]
        verdict = {"links": links, "is_sound": self.is_sound, "sentence": self.sentence}
        return json.dumps(asdict(self) | verdict, indent=1)


def compare(folder: Path, *, step: int | None = None, bisect: bool = False) -> Mismatch:
    """Compare engine and trainer on a recorded batch of a run.

    Args:
        step: whose batch; None: the newest one that can be compared.
        bisect: walk the states of the layers to the first that differs.

    Raises:
        FileNotFoundError: not a run that has made a step.
        ValueError: there is nothing to compare; in one line.
    """
    run = open_run(folder, step)
    outcome = Mismatch(str(folder), run.step, run.version, len(run.owners()))
    policy, tensors = read_policy(run)
    model = plain_model(run, tensors)
    sides = {
        ENGINE: engine_side(run, tensors),
        PLAIN: plain_side(run, model),
        TRAINER: trainer_side(run, policy),
    }
    values = {RECORDED: run.flat("engine"), **{name: side.logprobs for name, side in sides.items()}}
    updates = int(run.settings.get("training.mini_batches") or 1) * int(run.settings.get("training.epochs") or 1)
    if updates == 1 and not np.isnan(run.flat("trainer")).all():
        values[TRAINED] = run.flat("trainer")
    else:
        outcome.notes.append("the trainer's recorded numbers are not compared: other weights than the sampled ones")
    sections = {RECORDED: "generator", TRAINED: "training"}
    in_half = [name for name, section in sections.items() if run.settings.get(f"{section}.dtype") == "bfloat16"]
    noise = distance(run, plain_side(run, model, torch.bfloat16).logprobs, values[PLAIN]) if in_half else 0.0
    tolerances = dict.fromkeys(in_half, max(FLOAT32, HALF_TIMES * noise))

    def link_sides(first: str, second: str, component: str) -> Link:
        # The mean is that of `train/engine_difference`.
        mean = float(np.nanmean(np.abs(values[first].astype(np.float64) - values[second])))
        tolerance = max(tolerances.get(first, FLOAT32), tolerances.get(second, FLOAT32))
        return Link(first, second, component, mean, distance(run, values[first], values[second]), tolerance)

    outcome.links = [link_sides(first, second, COMPONENTS[second]) for first, second in pairwise(values)]
    if differing := [link for link in outcome.links if not link.agrees]:
        link = differing[0]
        outcome.component = link.component
        both_recorded = link.first == RECORDED and differing[-1].second == TRAINED
        if both_recorded and link_sides(RECORDED, TRAINED, TOGETHER).agrees:
            outcome.component = TOGETHER
        if bisect and link.first in sides and link.second in sides:
            outcome.part = find_part(sides[link.first], sides[link.second])
        location = f", {outcome.part}" if outcome.part else ""
        gap = f"{link.first} and {link.second} differ by {link.mean:.2g} nats on average"
        outcome.faults.append(f"{outcome.component}{location}: {gap}")
        outcome.notes += [f"also different: {x.first} and {x.second}, by {x.worst:.2g} nats" for x in differing[1:]]
    return outcome


def distance(run: RecordedRun, first: np.ndarray, second: np.ndarray) -> float:
    """Mean absolute difference, in nats, of the sequence in which it is largest.

    Args:
        first, second: [compared] log-probabilities; tokens with NaN in one of them are left aside.
    """
    gaps = np.abs(first.astype(np.float64) - second)
    usable = ~np.isnan(gaps)
    if sparse_layers(model_config(run.start)) and usable.any():
        usable &= ~(gaps > np.quantile(gaps[usable], 1 - FLIPPED))
    if not usable.any():
        return 0.0
    owners = run.owners()[usable]
    return float((np.bincount(owners, gaps[usable]) / np.maximum(np.bincount(owners), 1)).max())


def find_part(first: Side, second: Side) -> str:
    """Walk from the embedding to the head: the part after which states begin to differ."""
    for number, (state, second_state) in enumerate(zip(first.states, second.states, strict=True)):
        size = float((state - second_state).norm() / second_state.norm().clamp(min=1e-30))
        if size > STATES:
            name = f"layer {number - 1}" if number else "the embedding"
            return f"{name} (its states differ by {size:.1e} of their norm)"
    return "the last norm or the head (the states of all layers agree)"


class TracedDecoder(Decoder):
    """The engine's decoder, which records the states of each decoding step."""

    states: list[Tensor]

    def _embed(self, tokens: Tensor) -> Tensor:
        x = super()._embed(tokens)
        self.states = [x.float().clone()]
        return x

    def _finish_layer(self, layer: Layer, x: Tensor, attended: Tensor, choices: list[Tensor]) -> None:
        super()._finish_layer(layer, x, attended, choices)
        self.states.append(x.float().clone())


@torch.inference_mode()
def engine_side(run: RecordedRun, tensors: Mapping[str, Tensor]) -> Side:
    """Decode token by token with the cache, all sequences at once, as the embedded engine does, on a CPU."""
    config = load_config(run.start)
    weights = Weights(config, tensors.items(), torch.float32, CPU, run.version)
    sequences = run.sequences
    longest = max(len(sequence.tokens) for sequence in sequences)
    rows = rounded(len(sequences), WIDTH)
    decoder = TracedDecoder(config, weights, rows, longest, torch.float32, CPU)
    decoder.cache.reserve(longest, 0)
    # What is before the first sampled token is prefilled.
    filled = [row for row, sequence in enumerate(sequences) if sequence.context > 1]
    if filled:
        decoder.prefill([sequences[row].tokens[: sequences[row].context - 1].tolist() for row in filled], filled)

    idle = [0] * (rows - len(sequences))
    records: list[list[tuple[Tensor, Tensor]]] = [[] for _ in sequences]
    for step in range(max(len(sequence.tokens) - sequence.context for sequence in sequences)):
        # A sequence that has ended decodes its last token again, which changes nothing.
        places = [min(sequence.context - 1 + step, len(sequence.tokens) - 2) for sequence in sequences]
        inputs = [int(sequence.tokens[place]) for sequence, place in zip(sequences, places, strict=True)]
        length = min(rounded(max(places) + 1, decoder.granule), decoder.cache.longest)
        decoder.cache.reserve(length, len(sequences))
        logits = decoder.decode(torch.tensor(inputs + idle), torch.tensor(places + idle), length).float()
        states = torch.stack(decoder.states, 1)
        for row, (sequence, place) in enumerate(zip(sequences, places, strict=True)):
            if place == sequence.context - 1 + step and sequence.mask[place + 1]:
                records[row].append((logits[row], states[row]))

    all_logits, all_states = (torch.stack(parts) for parts in zip(*chain.from_iterable(records), strict=True))
    return Side(_logprobs(run, all_logits), list(all_states.unbind(1)))


def plain_model(run: RecordedRun, tensors: Mapping[str, Tensor]) -> Any:
    """Transformers' own model with eager attention in float32, which shares neither the cache, the attention nor the
    products of engine and trainer."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        run.start, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
    )
    model.requires_grad_(False).eval()
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)
    return model


@torch.no_grad()
def plain_side(run: RecordedRun, model: Any, dtype: torch.dtype = torch.float32) -> Side:
    """All sequences in one pass, padded on the right: causal attention hides that from all that comes before.

    Args:
        dtype: of the products.
    """
    sequences = run.sequences
    longest = max(len(sequence.tokens) for sequence in sequences)
    ids = torch.tensor([[*sequence.tokens, *[0] * (longest - len(sequence.tokens))] for sequence in sequences])

    def read(values: Tensor) -> Tensor:
        """The values that compared tokens are predicted from."""
        parts = [row[np.flatnonzero(s.mask) - 1] for row, s in zip(values, sequences, strict=True)]
        return torch.cat(parts).float()

    with traced(model) as states, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(read(hidden)).float()
    return Side(_logprobs(run, logits), [read(x) for x in states])


@torch.no_grad()
def trainer_side(run: RecordedRun, policy: Policy) -> Side:
    """The trainer's model in one process: all sequences in one pass, with a prompt that several share computed once."""
    batch = pack([Episode.given(sequence.tokens.tolist(), sequence.mask.tolist()) for sequence in run.sequences])
    # The order of the states that are read is that of the tokens which they predict.
    read = rank_tokens(batch, 1, policy.ranks or Ranks(0, 1, CPU, None)).state_indices
    with traced(policy.model) as states:
        scores = policy(batch, run.temperature)
    return Side(scores.logprobs.float().numpy(), [x[0][read].float() for x in states])


@contextmanager
def traced(model: Any) -> Iterator[list[Tensor]]:
    """Collect the output of the embedding and of each layer, [rows, tokens, dim], by forward hooks."""
    states: list[Tensor] = []

    def keep_output(module: object, inputs: object, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    modules = [model.model.embed_tokens, *model.model.layers]
    handles = [module.register_forward_hook(keep_output) for module in modules]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _logprobs(run: RecordedRun, logits: Tensor) -> np.ndarray:
    labels = torch.from_numpy(run.flat("tokens"))[:, None]
    return (logits / run.temperature).log_softmax(-1).gather(1, labels)[:, 0].numpy()
