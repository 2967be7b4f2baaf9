"""Engine, transformers and trainer on one recorded batch, in a row: where neighbours part, and by how much."""

import json
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM

from forge.config.plugin import resolve
from forge.config.sections import flatten_config
from forge.config.yaml_files import parse_yaml
from forge.data.packing import pack
from forge.engines.cache import WIDTH, round_up
from forge.engines.decoder import Decoder
from forge.engines.weights import Weights, is_decodable, load_config
from forge.models.architecture import sparse_layers
from forge.models.find import resolve_model
from forge.models.tokenizer import model_config
from forge.models.weight_layouts import merge_adapters, read_adapters
from forge.observability.folder import CONFIG, MARK
from forge.observability.rollouts import IDLE, ROLLOUTS, read_batches
from forge.system.checksums import check_files
from forge.training.checkpoint import list_checkpoints, step_of
from forge.training.checkpoint_reader import Planner, Reader
from forge.training.lora import add_adapters
from forge.training.policy import Policy
from forge.training.settings import LoraSettings
from forge.types import Episode

COLUMNS = ("step", "dropped", "tokens", "mask", "versions", "engine_logprobs", "logprobs")
SEQUENCES = 8  # compared at most: enough for a mean, and few enough for a large model on a CPU
TOKENS = 2048  # of all compared sequences together, unless the first one is longer by itself


@dataclass(frozen=True)
class SampledTokens:
    """One recorded token sequence; all arrays are [length].

    tokens: ids. mask: True for the tokens that are compared, those that the compared version sampled. engine, trainer:
    recorded log-probabilities in nats, NaN where there is none.
    """

    tokens: np.ndarray
    mask: np.ndarray
    engine: np.ndarray
    trainer: np.ndarray

    @property
    def context(self) -> int:
        """Return the number of tokens before the first that the policy sampled."""
        return int(np.flatnonzero(self.mask)[0])


@dataclass(frozen=True)
class RecordedRun:
    """The parts of a run directory that a comparison needs.

    settings: the configuration by dotted keys. start: the folder of the model that training started with. checkpoint:
    the saved weights of the compared version, None for version 0. step: the step that trained on the sequences.
    """

    settings: Mapping[str, Any]
    start: Path
    checkpoint: Path | None
    version: int
    step: int
    sequences: Sequence[SampledTokens] = field(repr=False)

    @property
    def temperature(self) -> float:
        """Return the temperature of sampling, which the trainer scores at."""
        return float(self.settings.get("grpo.temperature") or 1.0)

    def flat(self, name: str) -> np.ndarray:
        """Return the array `name` of `SampledTokens` at the compared tokens of all sequences, [compared]."""
        return np.concatenate([getattr(sequence, name)[sequence.mask] for sequence in self.sequences])

    def owners(self) -> np.ndarray:
        """Return the index of the sequence of each compared token, [compared]."""
        return np.repeat(np.arange(len(self.sequences)), [int(sequence.mask.sum()) for sequence in self.sequences])


def open_run(folder: Path, step: int | None = None) -> RecordedRun:
    """Return a run with the batch to compare: that of `step`, or the last one that weights of a checkpoint sampled.

    FileNotFoundError, ValueError: there is nothing to compare; the message is one line.
    """
    if not (folder / MARK).is_file() or not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is not a run that has made a step")
    settings = flatten_config(parse_yaml((folder / CONFIG).read_text(), folder / CONFIG))
    if any(key.startswith("models.") for key in settings):
        raise ValueError(f"{folder} trains several models, which forge mismatch does not support")
    if (backend := settings.get("trainer.backend", "fsdp")) != "fsdp":
        raise ValueError(
            f"{folder} was trained with trainer.backend {backend}: forge mismatch reads checkpoints of fsdp only"
        )
    start = Path(resolve_model(str(settings.get("model") or folder.with_name(f"{folder.name}-initial"))))
    saved = {step_of(path): path for path in list_checkpoints(folder / "checkpoints")}
    rows = [row for _, batch in read_batches(folder / ROLLOUTS, COLUMNS) for row in batch.to_pylist()]
    if not rows:
        raise ValueError(f"{folder} has no recorded rollouts: run with metrics.rollouts of 1 or more")
    sampled: dict[tuple[int, int], list[SampledTokens]] = defaultdict(list)  # by version and negative step
    for row in rows:
        if row["dropped"] in (None, IDLE) and step in (None, row["step"]):
            for version in {*row["versions"]} & {0, *saved}:
                if (sequence := _read_sequence(row, version, settings)) is not None:
                    sampled[version, -row["step"]].append(sequence)
    if not sampled:
        raise ValueError(
            f"no rollouts {'recorded' if step is None else f'of step {step}'} were sampled by weights that {folder} "
            "has: set checkpoint.every and checkpoint.keep so that a step follows a checkpoint"
        )

    # The newest weights, as a fault of publication shows only where they differ from the start, at their first step.
    version, negative_step = max(sampled)
    first = sampled[version, negative_step][:SEQUENCES]
    ends = accumulate(len(sequence.tokens) for sequence in first)
    chosen = [sequence for sequence, end in zip(first, ends, strict=True) if end <= TOKENS] or first[:1]
    return RecordedRun(settings, start, saved.get(version), version, -negative_step, chosen)


def _read_sequence(row: Mapping[str, Any], version: int, settings: Mapping[str, Any]) -> SampledTokens | None:
    """Return a recorded row for a comparison of the tokens that `version` sampled; None if they cannot be compared."""
    sampled = np.array(row["mask"], dtype=bool)
    mask = sampled & (np.array(row["versions"]) == version)
    # An engine that continues keeps keys and values of older weights: a sequence of several versions differs by design.
    keeps_cache = settings.get("generator.on_update", "continue") == "continue"
    if not mask.any() or mask[0] or (keeps_cache and not np.array_equal(mask, sampled)):
        return None
    engine, trainer = (np.array(row[name], dtype=np.float32) for name in ("engine_logprobs", "logprobs"))
    if np.isnan(engine[mask]).any():
        return None
    if row["step"] - 1 != version:  # the trainer's numbers are of the weights that the step trained
        trainer[:] = np.nan
    return SampledTokens(np.array(row["tokens"], dtype=np.int64), mask, engine, trainer)


@torch.no_grad()
def read_policy(run: RecordedRun) -> tuple[Policy, dict[str, Tensor]]:
    """Return the trainer's model with the weights of the compared version, in float32, and its published weights.

    The latter have the names of transformers' models, and adapters merged.
    ValueError: the checkpoint is not of this model, or damaged.
    """
    settings = {key.removeprefix("lora."): value for key, value in run.settings.items() if key.startswith("lora.")}
    lora = LoraSettings(**settings) if settings else None
    policy = Policy.from_pretrained(run.start)
    if lora is not None:
        add_adapters(policy.model, lora)

    # Version 0 of a resumed run may have a checkpoint of the same weights: the folder of the model is as good.
    if run.version and run.checkpoint is not None:
        try:
            check_files(run.checkpoint)
            reader = Reader(run.checkpoint)
            stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
            # In the checkpoint's own dtype; weights that are not in it are frozen ones of the base.
            weights = {name: weight for name, weight in policy.named_parameters() if f"model.{name}" in stored}
            buffers = {
                name: torch.empty_like(weight, dtype=stored[f"model.{name}"].properties.dtype)
                for name, weight in weights.items()
            }
            dcp.load({"model": buffers}, storage_reader=reader, planner=Planner())
            for name, weight in weights.items():
                weight.copy_(buffers[name])
        except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError, CheckpointException) as error:
            raise ValueError(f"{run.checkpoint} cannot be read: {' '.join(str(error).split())[:300]}") from error
    policy.requires_grad_(False).eval()
    tensors = {name: parameter.detach() for name, parameter in policy.named_weights()}
    if lora is not None:
        # W + (alpha / rank) B A, as a trainer publishes layers with adapters.
        factors = read_adapters(tensors.items())
        base = [(name, tensor) for name, tensor in tensors.items() if name not in factors]
        scales = {name: lora.alpha / lora.rank if name.endswith(".lora_B.weight") else 1.0 for name in factors}
        tensors = dict(merge_adapters(base, {name: factor * scales[name] for name, factor in factors.items()}))
    return policy, tensors


CPU = torch.device("cpu")
# Tolerance in nats, for the mean over the tokens of the sequence that differs most. In float32 engine, trainer and
# transformers differ by at most 2.5e-6 for tiny models of seven families on a CPU; larger models are not measured.
FLOAT32 = 1e-4
# Tolerance in half precision, as a multiple of its noise on the same batch: two kernels round differently.
HALF_TIMES = 3.0
# Share of the tokens of a mixture of experts that is left out: they may flip between experts that are almost tied.
FLIPPED = 0.02

RECORDED, TRAINED = "recorded engine", "recorded trainer"
ENGINE, PLAIN, TRAINER = "engine now", "plain forward pass", "trainer now"
# The component in which two neighbours differ, by the second of them.
COMPONENTS = {
    ENGINE: "the engine as it sampled",
    PLAIN: "the engine's forward pass",
    TRAINER: "the trainer's forward pass",
    TRAINED: "the trainer as it trained",
}
# If the recorded numbers agree with each other, and not with those that are computed now.
TOGETHER = "the saved weights, or the settings or the model of today"


@dataclass(frozen=True)
class Link:
    """Two neighbouring computations, `first` and `second`, and the component in which they differ if they do.

    mean: of |difference| over all tokens, in nats. worst: the same of the sequence that differs most, which is compared
    with the tolerance.
    """

    first: str
    second: str
    component: str
    mean: float
    worst: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Return whether the two differ by rounding only."""
        return self.worst <= self.tolerance


@dataclass
class Mismatch:
    """Result of a comparison of engine and trainer.

    component: in which the first link that disagrees differs; "" if all agree.
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
        """Return whether engine and trainer compute the same."""
        return not self.faults

    @property
    def sentence(self) -> str:
        """Return the verdict in one sentence, for a page alongside `train/engine_difference`."""
        if self.is_sound:
            return f"engine and trainer agree on {self.tokens} tokens of version {self.version}"
        return self.faults[0]

    def json(self) -> str:
        """Return the comparison of engine and trainer as JSON."""
        return json.dumps(asdict(self) | {"is_sound": self.is_sound, "sentence": self.sentence}, indent=1)


def compare_batch(folder: Path, *, step: int | None = None) -> Mismatch:
    """Compare engine and trainer on a recorded batch of a run, and name the first component in which they differ.

    Args:
        step: whose batch is compared; None for the newest one that can be.

    Raises:
        FileNotFoundError: not a run that has made a step.
        ValueError: there is nothing to compare; the message is one line.
    """
    run = open_run(folder, step)
    outcome = Mismatch(str(folder), run.step, run.version, len(run.owners()))
    policy, tensors = read_policy(run)
    # Transformers' own model shares no cache, attention or products with engine and trainer.
    model: Any = AutoModelForCausalLM.from_pretrained(
        run.start, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
    )
    model.requires_grad_(False).eval()
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)

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
    noise = measure_distance(run, plain_logprobs(run, model, torch.bfloat16), values[PLAIN]) if in_half else 0.0
    tolerances = dict.fromkeys(in_half, max(FLOAT32, HALF_TIMES * noise))

    def link_sides(first: str, second: str, component: str) -> Link:
        # The mean is `train/engine_difference`.
        mean = float(np.nanmean(np.abs(values[first].astype(np.float64) - values[second])))
        tolerance = max(tolerances.get(first, FLOAT32), tolerances.get(second, FLOAT32))
        return Link(first, second, component, mean, measure_distance(run, values[first], values[second]), tolerance)

    outcome.links = [link_sides(first, second, COMPONENTS[second]) for first, second in pairwise(values)]
    if differing := [link for link in outcome.links if not link.agrees]:
        link = differing[0]
        outcome.component = link.component
        is_recorded = link.first == RECORDED and differing[-1].second == TRAINED
        if is_recorded and link_sides(RECORDED, TRAINED, TOGETHER).agrees:
            outcome.component = TOGETHER
        gap = f"{link.first} and {link.second} differ by {link.mean:.2g} nats on average"
        outcome.faults.append(f"{outcome.component}: {gap}")
        others = (f"{other.first} and {other.second}, by {other.worst:.2g} nats" for other in differing[1:])
        outcome.notes += [f"also different: {text}" for text in others]
    return outcome


def measure_distance(run: RecordedRun, first: np.ndarray, second: np.ndarray) -> float:
    """Return the mean absolute difference of log-probabilities [compared], in nats, of the sequence that differs most.

    Tokens with NaN in one of the two are left out.
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
    """Return log-probabilities, [compared], by the embedded engine on a CPU: decoded token by token with its cache."""
    config = load_config(run.start)
    open_model = resolve("forge_families.engine:open_model", "model")
    tier = (Weights, Decoder) if is_decodable(config) else open_model(run.start, torch.float32, CPU)
    weights = tier[0](config, tensors.items(), torch.float32, CPU, run.version)
    sequences, rows = run.sequences, round_up(len(run.sequences), WIDTH)
    longest = max(len(sequence.tokens) for sequence in sequences)
    decoder = tier[1](config, weights, rows, longest, torch.float32, CPU)
    decoder.cache.reserve(longest, 0)
    # The last token of the context is the first input, as it predicts the first sampled token; those before prefill.
    starts = [sequence.context - 1 for sequence in sequences]
    if filled := [row for row, start in enumerate(starts) if start > 0]:
        decoder.prefill([sequences[row].tokens[: starts[row]].tolist() for row in filled], filled)
    idle = [0] * (rows - len(sequences))
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for step in range(max(len(sequence.tokens) - sequence.context for sequence in sequences)):
        # A sequence that has ended decodes its last input again, which changes nothing.
        last_inputs = [len(sequence.tokens) - 2 for sequence in sequences]
        positions = [min(start + step, last) for start, last in zip(starts, last_inputs, strict=True)]
        inputs = [int(sequence.tokens[position]) for sequence, position in zip(sequences, positions, strict=True)]
        length = min(round_up(max(positions) + 1, decoder.granule), decoder.cache.longest)
        decoder.cache.reserve(length, len(sequences))
        decoded = decoder.decode(torch.tensor(inputs + idle), torch.tensor(positions + idle), length).float()
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            if position == starts[row] + step and sequence.mask[position + 1]:
                logits[row].append(decoded[row])
    return _compute_logprobs(run, torch.stack([*chain.from_iterable(logits)]))


@torch.no_grad()
def plain_logprobs(run: RecordedRun, model: Any, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Return log-probabilities, [compared], by one forward pass of transformers' model with products in `dtype`.

    Shorter sequences are padded on the right, which no token attends to, as attention is causal.
    """
    sequences = run.sequences
    longest = max(len(sequence.tokens) for sequence in sequences)
    ids = torch.tensor([[*sequence.tokens, *[0] * (longest - len(sequence.tokens))] for sequence in sequences])
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        # A token is predicted from the hidden state of the token before it.
        states = [row[np.flatnonzero(sequence.mask) - 1] for row, sequence in zip(hidden, sequences, strict=True)]
        logits = model.lm_head(torch.cat(states).float()).float()
    return _compute_logprobs(run, logits)


@torch.no_grad()
def trainer_logprobs(run: RecordedRun, policy: Policy) -> np.ndarray:
    """Return log-probabilities, [compared], by one pass of the trainer's model, which computes shared prompts once."""
    batch = pack([Episode.given(sequence.tokens.tolist(), sequence.mask.tolist()) for sequence in run.sequences])
    return policy(batch, run.temperature).logprobs.float().numpy()


def _compute_logprobs(run: RecordedRun, logits: Tensor) -> np.ndarray:
    labels = torch.from_numpy(run.flat("tokens"))[:, None]
    return (logits / run.temperature).log_softmax(-1).gather(1, labels)[:, 0].numpy()
