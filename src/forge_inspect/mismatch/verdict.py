"""Engine, transformers and trainer on one recorded batch, in a row: where neighbours part, and by how much."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from forge.engines.weights import Weights, load_config
from forge.models.architecture import sparse_layers
from forge.models.tokenizer import model_config
from forge.training.policy import Policy
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

    component: of the first link that disagrees; empty: there is none.
    """

    run: str
    step: int
    version: int
    tokens: int
    links: list[Link] = field(default_factory=list)
    component: str = ""
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


def compare(folder: Path, *, step: int | None = None) -> Mismatch:
    """Compare engine and trainer on a recorded batch of a run.

    Args:
        step: whose batch; None: the newest one that can be compared.

    Raises:
        FileNotFoundError: not a run that has made a step.
        ValueError: there is nothing to compare; in one line.
    """
    run = open_run(folder, step)
    outcome = Mismatch(str(folder), run.step, run.version, len(run.owners()))
    policy, tensors = read_policy(run)
    model = plain_model(run, tensors)
    # Log-probabilities of the compared tokens, [compared] in nats.
    values = {
        RECORDED: run.flat("engine"),
        ENGINE: engine_logprobs(run, tensors),
        PLAIN: plain_logprobs(run, model),
        TRAINER: trainer_logprobs(run, policy),
    }
    updates = int(run.settings.get("training.mini_batches") or 1) * int(run.settings.get("training.epochs") or 1)
    if updates == 1 and not np.isnan(run.flat("trainer")).all():
        values[TRAINED] = run.flat("trainer")
    else:
        outcome.notes.append("the trainer's recorded numbers are not compared: other weights than the sampled ones")
    sections = {RECORDED: "generator", TRAINED: "training"}
    in_half = [name for name, section in sections.items() if run.settings.get(f"{section}.dtype") == "bfloat16"]
    noise = distance(run, plain_logprobs(run, model, torch.bfloat16), values[PLAIN]) if in_half else 0.0
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
        gap = f"{link.first} and {link.second} differ by {link.mean:.2g} nats on average"
        outcome.faults.append(f"{outcome.component}: {gap}")
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


@torch.inference_mode()
def engine_logprobs(run: RecordedRun, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Decode token by token with the cache, all sequences at once, as the embedded engine does, on a CPU."""
    config = load_config(run.start)
    weights = Weights(config, tensors.items(), torch.float32, CPU, run.version)
    sequences = run.sequences
    longest = max(len(sequence.tokens) for sequence in sequences)
    rows = rounded(len(sequences), WIDTH)
    decoder = Decoder(config, weights, rows, longest, torch.float32, CPU)
    decoder.cache.reserve(longest, 0)
    # What is before the first sampled token is prefilled.
    filled = [row for row, sequence in enumerate(sequences) if sequence.context > 1]
    if filled:
        decoder.prefill([sequences[row].tokens[: sequences[row].context - 1].tolist() for row in filled], filled)

    idle = [0] * (rows - len(sequences))
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for step in range(max(len(sequence.tokens) - sequence.context for sequence in sequences)):
        # A sequence that has ended decodes its last token again, which changes nothing.
        places = [min(sequence.context - 1 + step, len(sequence.tokens) - 2) for sequence in sequences]
        inputs = [int(sequence.tokens[place]) for sequence, place in zip(sequences, places, strict=True)]
        length = min(rounded(max(places) + 1, decoder.granule), decoder.cache.longest)
        decoder.cache.reserve(length, len(sequences))
        decoded = decoder.decode(torch.tensor(inputs + idle), torch.tensor(places + idle), length).float()
        for row, (sequence, place) in enumerate(zip(sequences, places, strict=True)):
            if place == sequence.context - 1 + step and sequence.mask[place + 1]:
                logits[row].append(decoded[row])
    return _logprobs(run, torch.stack([*chain.from_iterable(logits)]))


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
def plain_logprobs(run: RecordedRun, model: Any, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """All sequences in one pass, padded on the right: causal attention hides that from all that comes before.

    Args:
        dtype: of the products.
    """
    sequences = run.sequences
    longest = max(len(sequence.tokens) for sequence in sequences)
    ids = torch.tensor([[*sequence.tokens, *[0] * (longest - len(sequence.tokens))] for sequence in sequences])
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        # Those that compared tokens are predicted from.
        rows = [row[np.flatnonzero(s.mask) - 1] for row, s in zip(hidden, sequences, strict=True)]
        logits = model.lm_head(torch.cat(rows).float()).float()
    return _logprobs(run, logits)


@torch.no_grad()
def trainer_logprobs(run: RecordedRun, policy: Policy) -> np.ndarray:
    """The trainer's model in one process: all sequences in one pass, with a prompt that several share computed once."""
    batch = pack([Episode.given(sequence.tokens.tolist(), sequence.mask.tolist()) for sequence in run.sequences])
    return policy(batch, run.temperature).logprobs.float().numpy()


def _logprobs(run: RecordedRun, logits: Tensor) -> np.ndarray:
    labels = torch.from_numpy(run.flat("tokens"))[:, None]
    return (logits / run.temperature).log_softmax(-1).gather(1, labels)[:, 0].numpy()
