"""The recorded batch of a run: sequences that one version of the weights sampled, and what the folder has of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forge.config.sections import flat
from forge.config.yaml_files import parse_yaml
from forge.data.packing import pack
from forge.models.find import resolve_model
from forge.observability.folder import CONFIG, MARK
from forge.observability.rollouts import IDLE, ROLLOUTS, batches
from forge.training.checkpoint import checkpoints, step_of
from forge.types import Batch, Episode

COLUMNS = (
    *("step", "group", "sample", "branch", "prompt", "dropped", "tokens", "mask", "versions"),
    *("engine_logprobs", "ref_logprobs", "logprobs"),
)
SEQUENCES = 8  # sequences of a comparison: enough for a mean, and few enough for a large model on a CPU
TOKENS = 2048  # tokens of them together


@dataclass(frozen=True)
class SampledTokens:
    """One recorded token sequence.

    tokens: [length] ids. mask: [length], the tokens to compare: sampled by the version. engine, trainer, reference:
    [length] recorded log-probabilities in nats, NaN where there is none. prompt: the text that the policy was asked.
    """

    tokens: np.ndarray
    mask: np.ndarray
    engine: np.ndarray
    trainer: np.ndarray
    reference: np.ndarray
    group: int
    prompt: str

    @property
    def context(self) -> int:
        """The number of tokens before the first that the policy sampled."""
        return int(np.flatnonzero(self.mask)[0])


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder as far as a comparison needs it.

    settings: the configuration by dotted keys. start: the folder of the model that training began with. checkpoints: by
    version. version: that of the weights which sampled the sequences, at step `step`.
    """

    folder: Path
    settings: Mapping[str, Any]
    start: Path
    checkpoints: Mapping[int, Path]
    version: int
    step: int
    sequences: Sequence[SampledTokens] = field(repr=False)

    @property
    def temperature(self) -> float:
        """The temperature of sampling, which the trainer scores at."""
        return float(self.settings.get("grpo.temperature") or 1.0)

    @property
    def lora(self) -> dict[str, Any] | None:
        """The settings of the adapters; None: all weights train."""
        prefix = "lora."
        lora = {key.removeprefix(prefix): value for key, value in self.settings.items() if key.startswith(prefix)}
        return lora or None

    @property
    def updates(self) -> int:
        """Updates of a step: with one the trainer's recorded numbers are those of the version that sampled."""
        return int(self.settings.get("training.mini_batches") or 1) * int(self.settings.get("training.epochs") or 1)

    @property
    def saved_model(self) -> Path | None:
        """The exported model, where the run has come to its end."""
        folder = self.folder / "model"
        return folder if (folder / "config.json").is_file() else None

    @property
    def versions(self) -> list[int]:
        """The versions whose weights the folder has, in order."""
        return sorted({0, *self.checkpoints})

    def flat(self, name: str) -> np.ndarray:
        """A column of the compared tokens of all sequences, [compared]."""
        return np.concatenate([getattr(sequence, name)[sequence.mask] for sequence in self.sequences])

    def owners(self) -> np.ndarray:
        """The number of the sequence of each compared token, [compared]."""
        return np.repeat(np.arange(len(self.sequences)), [int(sequence.mask.sum()) for sequence in self.sequences])

    def batch(self, sequences: Sequence[SampledTokens] | None = None) -> Batch:
        """The sequences as a trainer gets them, back to back."""
        batch_sequences = self.sequences if sequences is None else sequences
        return pack([Episode.given(s.tokens.tolist(), s.mask.tolist()) for s in batch_sequences])


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
        raise FileNotFoundError(folder)
    settings = flat(parse_yaml((folder / CONFIG).read_text(), folder / CONFIG))
    if any(key.startswith("models.") for key in settings):
        raise ValueError(f"{folder} has several models, whose rollouts are recorded together: it cannot be compared")
    if settings.get("trainer.backend") == "titan":
        raise ValueError(f"{folder} was trained by TorchTitan, whose checkpoints are not read here: use backend fsdp")
    saved = {step_of(path): path for path in checkpoints(folder / "checkpoints")}
    start = _start_model(folder, settings)
    rows = [row for _, batch in batches(folder / ROLLOUTS, COLUMNS) for row in batch.to_pylist()]
    if not rows:
        raise ValueError(f"{folder} has no recorded rollouts: set metrics.rollouts to 1 or more")
    by_source: dict[tuple[int, int], list[SampledTokens]] = defaultdict(list)
    for row in rows:
        if row["dropped"] in (None, IDLE) and (step is None or row["step"] == step):
            for version in {*row["versions"]} & {0, *saved}:
                if (sequence := _sequence(row, version, settings)) is not None:
                    by_source[row["step"], version].append(sequence)
    if not by_source:
        which_ones = "recorded" if step is None else f"of step {step}"
        names = ", ".join(map(str, sorted({0, *saved})))
        raise ValueError(
            f"no rollouts {which_ones} were sampled by weights that {folder} has (versions {names}): set "
            "checkpoint.every and checkpoint.keep so that a step follows a checkpoint"
        )
    # The newest weights: a fault of publication shows only where they differ from the start.
    newest_source = max(by_source, key=lambda source: (source[1], -source[0]))
    sequences = _some(by_source[newest_source])
    return RecordedRun(folder, settings, start, saved, newest_source[1], newest_source[0], sequences)


def _start_model(folder: Path, settings: Mapping[str, Any]) -> Path:
    """The model that the run began with. ValueError: it is not where it was."""
    name = settings.get("model")
    initial = folder.with_name(f"{folder.name}-initial")
    try:
        return Path(resolve_model(str(name or initial)))
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"the model that {folder} began with cannot be read: {error}") from None


def _sequence(row: Mapping[str, Any], version: int, settings: Mapping[str, Any]) -> SampledTokens | None:
    """The tokens of a row that a version sampled; None: there are none, or their context is of other weights."""
    versions = np.array(row["versions"])
    sampled = np.array(row["mask"], dtype=bool)
    mask = sampled & (versions == version)
    keeps_cache = settings.get("generator.on_update", "continue") == "continue"
    # An engine that continues keeps the keys and values of older weights: that difference is by design.
    if not mask.any() or mask[0] or (keeps_cache and not np.array_equal(mask, sampled)):
        return None
    columns = {name: np.array(row[name], dtype=np.float32) for name in ("engine_logprobs", "ref_logprobs", "logprobs")}
    if np.isnan(columns["engine_logprobs"][mask]).any():
        return None
    # The trainer's numbers are of the weights that the step trained.
    is_current = row["step"] - 1 == version
    trainer = columns["logprobs"] if is_current else np.full(len(mask), np.nan, np.float32)
    return SampledTokens(
        tokens=np.array(row["tokens"], dtype=np.int64),
        mask=mask,
        engine=columns["engine_logprobs"],
        trainer=trainer,
        reference=columns["ref_logprobs"],
        group=row["group"],
        prompt=row["prompt"] or "",
    )


def _some(sequences: Sequence[SampledTokens]) -> list[SampledTokens]:
    """The first sequences, of as many groups as there are, within the limits of a comparison."""
    by_group: dict[int, list[SampledTokens]] = defaultdict(list)
    for sequence in sequences:
        by_group[sequence.group].append(sequence)
    turns = [group[turn] for turn in range(SEQUENCES) for group in by_group.values() if turn < len(group)]
    compared_sequences: list[SampledTokens] = []
    for sequence in turns[:SEQUENCES]:
        if (
            compared_sequences
            and sum(len(earlier.tokens) for earlier in compared_sequences) + len(sequence.tokens) > TOKENS
        ):
            break
        compared_sequences.append(sequence)
    return compared_sequences
