"""The recorded batch of a run: sequences that one version of the weights sampled, and these weights."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from forge.config.sections import flat
from forge.config.yaml_files import parse_yaml
from forge.models.find import resolve_model
from forge.models.weight_layouts import adapters, merge_adapters
from forge.observability.folder import CONFIG, MARK
from forge.observability.rollouts import IDLE, ROLLOUTS, batches
from forge.system.checksums import check_files
from forge.training.checkpoint import checkpoints, step_of
from forge.training.checkpoint_reader import Planner, Reader
from forge.training.lora import add_adapters
from forge.training.policy import Policy
from forge.training.settings import LoraSettings

COLUMNS = ("step", "group", "dropped", "tokens", "mask", "versions", "engine_logprobs", "logprobs")
SEQUENCES = 8  # of a comparison: enough for a mean, and few enough for a large model on a CPU
TOKENS = 2048  # of them together


@dataclass(frozen=True)
class SampledTokens:
    """One recorded token sequence.

    tokens: [length] ids. mask: [length], the tokens to compare: sampled by the version. engine, trainer: [length]
    recorded log-probabilities in nats, NaN where there is none.
    """

    tokens: np.ndarray
    mask: np.ndarray
    engine: np.ndarray
    trainer: np.ndarray

    @property
    def context(self) -> int:
        """The number of tokens before the first that the policy sampled."""
        return int(np.flatnonzero(self.mask)[0])


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder as far as a comparison needs it.

    settings: the configuration by dotted keys. start: the folder of the model that training began with. checkpoint:
    that of the version, which sampled the sequences at step `step`; None for version 0.
    """

    settings: Mapping[str, Any]
    start: Path
    checkpoint: Path | None
    version: int
    step: int
    sequences: Sequence[SampledTokens] = field(repr=False)

    @property
    def temperature(self) -> float:
        """The temperature of sampling, which the trainer scores at."""
        return float(self.settings.get("grpo.temperature") or 1.0)

    def flat(self, name: str) -> np.ndarray:
        """A column of the compared tokens of all sequences, [compared]."""
        return np.concatenate([getattr(sequence, name)[sequence.mask] for sequence in self.sequences])

    def owners(self) -> np.ndarray:
        """The number of the sequence of each compared token, [compared]."""
        return np.repeat(np.arange(len(self.sequences)), [int(sequence.mask.sum()) for sequence in self.sequences])


def open_run(folder: Path, step: int | None = None) -> RecordedRun:
    """Read the folder of a run.

    Args:
        step: the step whose batch is compared; None: the last one that the weights of a checkpoint sampled.

    Raises:
        FileNotFoundError: not a run that has made a step.
        ValueError: there is nothing to compare: no recorded tokens of weights that the folder has, or a backend whose
            weights cannot be read; in one line.
    """
    if not (folder / MARK).is_file() or not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is not a run that has made a step")
    settings = flat(parse_yaml((folder / CONFIG).read_text(), folder / CONFIG))
    if any(key.startswith("models.") for key in settings):
        raise ValueError(f"{folder} has several models, whose rollouts are recorded together: it cannot be compared")
    if settings.get("trainer.backend") == "titan":
        raise ValueError(f"{folder} was trained by TorchTitan, whose checkpoints are not read here: use backend fsdp")
    try:
        start = Path(resolve_model(str(settings.get("model") or folder.with_name(f"{folder.name}-initial"))))
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"the model that {folder} began with cannot be read: {error}") from None

    saved = {step_of(path): path for path in checkpoints(folder / "checkpoints")}
    rows = [row for _, batch in batches(folder / ROLLOUTS, COLUMNS) for row in batch.to_pylist()]
    if not rows:
        raise ValueError(f"{folder} has no recorded rollouts: set metrics.rollouts to 1 or more")
    # By version and step, then by group.
    sampled: dict[tuple[int, int], dict[int, list[SampledTokens]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["dropped"] in (None, IDLE) and step in (None, row["step"]):
            for version in {*row["versions"]} & {0, *saved}:
                if (sequence := _sequence(row, version, settings)) is not None:
                    sampled[version, -row["step"]][row["group"]].append(sequence)
    if not sampled:
        which_ones = "recorded" if step is None else f"of step {step}"
        names = ", ".join(map(str, sorted({0, *saved})))
        raise ValueError(
            f"no rollouts {which_ones} were sampled by weights that {folder} has (versions {names}): set "
            "checkpoint.every and checkpoint.keep so that a step follows a checkpoint"
        )
    # The newest weights: a fault of publication shows only where they differ from the start.
    version, negative_step = max(sampled)
    groups = sampled[version, negative_step].values()
    # The first ones, of as many groups as there are, within the limits of a comparison.
    turns = [group[turn] for turn in range(SEQUENCES) for group in groups if turn < len(group)][:SEQUENCES]
    ends = list(accumulate(len(sequence.tokens) for sequence in turns))
    chosen = [sequence for sequence, end in zip(turns, ends, strict=True) if end <= TOKENS] or turns[:1]
    return RecordedRun(settings, start, saved.get(version), version, -negative_step, chosen)


def _sequence(row: Mapping[str, Any], version: int, settings: Mapping[str, Any]) -> SampledTokens | None:
    """The tokens of a row that a version sampled; None: there are none, or their context is of other weights."""
    sampled = np.array(row["mask"], dtype=bool)
    mask = sampled & (np.array(row["versions"]) == version)
    keeps_cache = settings.get("generator.on_update", "continue") == "continue"
    # An engine that continues keeps the keys and values of older weights: that difference is by design.
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
    """Read the weights of the run's version.

    Returns:
        the trainer's model, in float32 and in one process, with its adapters; and the weights that are published,
        adapters merged, by the names of transformers' models; tied ones once.

    Raises:
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
            # In the checkpoint's own dtype; weights that it lacks are frozen ones of the base.
            weights = {name: weight for name, weight in policy.named_parameters() if f"model.{name}" in stored}
            buffers = {
                name: torch.empty_like(weight, dtype=stored[f"model.{name}"].properties.dtype)
                for name, weight in weights.items()
            }
            dcp.load({"model": buffers}, storage_reader=reader, planner=Planner())
            for name, weight in weights.items():
                weight.copy_(buffers[name])
        except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError, CheckpointException) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"{run.checkpoint} cannot be read: {reason}") from error
    policy.requires_grad_(False).eval()

    tensors = {name: parameter.detach() for name, parameter in policy.named_weights()}
    if lora is not None:
        # W + (alpha / rank) B A, as a trainer publishes layers with adapters.
        factors = adapters(tensors.items())
        base = [(name, tensor) for name, tensor in tensors.items() if name not in factors]
        scales = {name: lora.alpha / lora.rank if name.endswith(".lora_B.weight") else 1.0 for name in factors}
        tensors = dict(merge_adapters(base, {name: factor * scales[name] for name, factor in factors.items()}))
    return policy, tensors
